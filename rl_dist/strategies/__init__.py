"""Strategies to train a module on several ranks, and its precision."""
