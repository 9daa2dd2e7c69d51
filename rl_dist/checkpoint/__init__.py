"""Checkpoints: sealed files, checks of their contents, trusted modules."""
