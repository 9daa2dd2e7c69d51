"""Daily stock trading: data, features, accounting, environment and baselines."""
