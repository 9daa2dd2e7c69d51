"""What became of a run, read from its directory."""
