"""Run environments in worker processes."""
