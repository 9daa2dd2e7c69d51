"""The learner: recurrent PPO over gymnasium vector environments, on one rank or many."""
