"""Predict training speed on more GPUs from short measured runs and a model."""
