"""Predictions for more GPUs: short measured runs, a model, a report."""
