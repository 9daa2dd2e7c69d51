"""Report on a run: metrics, progress, profiles, hardware usage and events."""
