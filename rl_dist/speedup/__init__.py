"""What more GPUs would bring: short measured runs, a model, a report."""
