"""Start and watch ranks in this process, in new processes or under torchrun."""
