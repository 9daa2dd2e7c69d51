"""Distributed runtime: ranks, collectives, metrics, checkpoints; nothing of RL."""
