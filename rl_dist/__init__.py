"""Distributed runtime: ranks, collectives, metrics and checkpoints, with no knowledge of RL."""
