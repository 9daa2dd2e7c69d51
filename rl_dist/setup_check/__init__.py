"""Verdicts on a machine for a planned training."""
