"""The learner: recurrent PPO over vector environments, on one rank or many."""

import rl_dist  # noqa: F401  # before torch: see there
from rl_dist.errors import check_one_copy

check_one_copy(__file__)
