"""Train a module on several ranks: parallel strategies and numeric precisions."""
