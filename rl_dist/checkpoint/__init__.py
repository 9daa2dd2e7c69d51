"""Write, check and load checkpoints; import only trusted modules."""
