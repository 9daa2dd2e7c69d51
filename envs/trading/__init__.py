"""Daily stock trading: data, features, accounting, environment, simulated market and rules."""
