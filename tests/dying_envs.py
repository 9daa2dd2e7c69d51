"""An environment that ends the process of rank DIE_RANK in the way DIE: `dying_envs:Dying-v0`."""

import os
import signal

import gymnasium
from faulty_envs import Walk

from rl_dist.launch.ranks import restart_count


class Dying(Walk):
    """Walk that ends its process at step 40, in the first life of its rank."""

    def step(self, action):
        here = os.environ.get("RANK", "0") == os.environ.get("DIE_RANK", "0")
        if here and not restart_count() and self.life == 40:
            way = os.environ["DIE"]
            if way.startswith("SIG"):
                os.kill(os.getpid(), signal.Signals[way])
            else:
                os._exit(int(way))
        return super().step(action)


gymnasium.register("Dying-v0", entry_point=Dying)
