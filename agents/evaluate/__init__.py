"""Evaluate trained policies, compare them, and draw pictures."""
