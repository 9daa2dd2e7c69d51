"""Pre-train the feature LSTM on market data."""
