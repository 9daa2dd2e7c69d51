"""The learner: recurrent PPO over vector environments, on one rank or many."""
