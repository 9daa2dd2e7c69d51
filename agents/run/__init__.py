"""Choose, check, start and resume training runs."""
