"""A run: its configuration, its directory, how it goes on."""
