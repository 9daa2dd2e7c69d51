"""Write, check and load checkpoints; check which modules a run may import."""
