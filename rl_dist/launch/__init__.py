"""Start ranks in this process, in new processes or under torchrun; watch them."""
