"""The algorithm: recurrent PPO on vector environments, on one rank or many."""
