"""A run directory to go on with: sealed files, lock, trust."""
