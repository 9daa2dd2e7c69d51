"""Parts of policies: normaliser, encoders, cores, heads; sequences, minibatches."""
