"""Use short runs and a model to predict the speed of training on more GPUs."""
