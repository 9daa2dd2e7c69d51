"""The Python interface: train policies, watch training, and use trained policies."""
