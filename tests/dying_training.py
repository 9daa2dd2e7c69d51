"""train_distributed.py with one rank that dies at a chosen point.

The rank dies only in the first start; restarted ranks train normally. Spawned ranks import this
script again, so they also get the changed methods of Training. The environment variable DIE holds
the place, the rank, the iteration, and how the rank ends. If DIE_FOLDER is set, the rank creates
the file `here` in that folder before it dies, and waits for the file `go`.
"""

if __name__ == "__main__":  # the supervisor must start before torch is imported
    from rl_dist.launch.supervisor import supervise

    supervise()

import os
import signal
import sys
import time
from pathlib import Path

import train_distributed
from agents.learner.trainer import Training
from rl_dist.launch.ranks import restart_count
from rl_dist.launch.supervisor import imports_done

WAY = os.environ["DIE"].split()[-1]
real = {"rollout": Training.collect, "update": Training.update, "checkpoint": Training.state}


def die(*_):
    if folder := os.environ.get("DIE_FOLDER"):
        Path(folder, "here").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.02)
    if WAY == "error":
        raise RuntimeError("the roof is on fire")
    if WAY.isdecimal():
        os._exit(int(WAY))
    os.kill(os.getpid(), signal.Signals[WAY])


def dying(where):
    """Return a replacement for a Training method, in which the chosen rank dies."""

    def method(training, *args, **kwargs):
        now = f"{where} {training.world.rank} {training.iteration} {WAY}"
        if now == os.environ["DIE"] and restart_count() == 0:
            if where == "rollout":
                training.env.step = die
            elif where == "update":  # after the ranks have reduced their gradients
                training.ppo.strategy.step = die
            elif training.world.is_main_process:  # the checkpoint is written but not renamed
                os.fsync = die
            else:  # before the ranks gather the state to save
                die()
        return real[where](training, *args, **kwargs)

    return method


Training.collect = dying("rollout")
Training.update = dying("update")
Training.state = dying("checkpoint")

if __name__ == "__main__":
    imports_done()
    sys.exit(train_distributed.main())
