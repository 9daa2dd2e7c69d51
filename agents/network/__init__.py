"""Parts of the policy network, and the sequences that train it."""
