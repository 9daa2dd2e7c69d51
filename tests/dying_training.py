"""train_distributed.py with one rank that ends at a chosen instant of its first start.

Spawned ranks import this script again, so that they, too, get the changes below. The variable DIE
names the place, the rank, the iteration and the end; with DIE_FOLDER the rank first writes the file
`here` there and waits for the file `go`.
"""

import os
import signal
import sys
import time
from pathlib import Path

import train_distributed
from agents.trainer import Training
from rl_dist.errors import UserError
from rl_dist.launch.ranks import restart_count

WHERE, RANK, ITERATION, HOW = os.environ["DIE"].split()
collect = Training.collect
update = Training.update
state = Training.state


def die(*_):
    if folder := os.environ.get("DIE_FOLDER"):
        Path(folder, "here").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.02)
    if HOW == "error":
        raise RuntimeError("the roof is on fire")
    if HOW == "mistake":
        raise UserError("num_envs must be at least 1, got 0")
    os.kill(os.getpid(), signal.Signals[HOW])


def is_time(training, where):
    mine = (where, training.world.rank, training.iteration) == (WHERE, int(RANK), int(ITERATION))
    return mine and restart_count() == 0


def die_at_call(owner, name, number):
    """Let the call `owner.name(...)` with this number end the rank."""
    real, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(name)
        return die() if len(calls) == number else real(*args, **kwargs)

    setattr(owner, name, counted)


def dying_collect(training, lifetime_step):
    if is_time(training, "rollout"):
        die_at_call(training.env, "step", 7)
    return collect(training, lifetime_step)


def dying_update(training, rollout):
    if is_time(training, "update"):
        die_at_call(training.ppo.optimizer, "step", 2)
    return update(training, rollout)


def dying_state(training):
    """Die in the middle of a checkpoint.

    The main process dies before it renames the written file, others before they gather.
    """
    if is_time(training, "checkpoint") and training.world.is_main_process:
        os.fsync = die
    elif is_time(training, "checkpoint"):
        die()
    return state(training)


Training.collect = dying_collect
Training.update = dying_update
Training.state = dying_state

if __name__ == "__main__":
    sys.exit(train_distributed.main())
