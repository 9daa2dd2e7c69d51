"""Export a trained policy to one file for other runtimes, and verify the file."""
