"""Pre-training of the feature LSTM on market data."""
