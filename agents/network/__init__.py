"""Parts of the policy network, and the sequences and minibatches that train it."""
