"""The Python interface: train, watch a training, and use what it learned."""
