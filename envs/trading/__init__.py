"""Daily stock trading: data, features, environment, simulated markets, rules."""
