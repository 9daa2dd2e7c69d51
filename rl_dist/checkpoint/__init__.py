"""A run directory that can be gone on with: sealed files, the folder of them, lock, trust."""
