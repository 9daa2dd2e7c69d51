"""What a run tells: metrics, progress, profile, use of the machine, events."""
