"""Daily stock trading: market data, features, environment, simulated markets, rules."""
