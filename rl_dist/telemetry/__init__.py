"""What a run reports: metrics, progress, profile, use of the machine, events."""
