"""Write, check and load checkpoints; import only modules that are trusted."""
