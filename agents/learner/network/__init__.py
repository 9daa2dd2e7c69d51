"""Parts of the policy network, the sequences that train it, and random numbers."""
