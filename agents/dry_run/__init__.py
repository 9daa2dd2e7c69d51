"""What is measured or computed before training: memory, batch size, strategy."""
