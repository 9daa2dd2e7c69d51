"""Evaluation of trained policies, with comparisons and pictures."""
