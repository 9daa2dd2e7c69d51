"""Start and watch ranks: in this process, in new ones, or under torchrun."""
