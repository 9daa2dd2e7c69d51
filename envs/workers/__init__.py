"""Environments in processes: choice, host, worker, vector environment."""
