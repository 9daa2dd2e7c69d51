"""A trained policy as one file for other runtimes, checked against the original."""
