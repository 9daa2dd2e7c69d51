"""Reports of a run: metrics, progress, profile, use of the machine, events."""
