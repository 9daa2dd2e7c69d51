"""Predict training on more GPUs: short measured runs, a model, a report."""
