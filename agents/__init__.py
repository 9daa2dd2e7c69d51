"""The learner: recurrent PPO over vector environments, on one rank or many."""

import rl_dist  # noqa: F401  # before torch: see there
