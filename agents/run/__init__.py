"""A run: its configuration, its directory and its resume."""
