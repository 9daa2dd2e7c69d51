"""Daily stock trading: data, features, accounting, environment, baselines."""
