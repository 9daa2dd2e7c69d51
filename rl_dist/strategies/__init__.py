"""How a module trains on several ranks: strategies, precision, loaders."""
