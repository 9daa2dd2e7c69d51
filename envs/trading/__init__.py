"""Daily stock trading: data, indicators, features, accounting, environment, baselines."""
