"""Training of a module on several ranks: strategies, precision, loaders."""
