"""train_distributed.py with a callback, core or logger that exits or hangs.

The environment variable ODD says what misbehaves, how, and on which rank, such as "callback exit
1"; rank -1 means every rank. Ranks import this script again, so they also get the changed logger.
"""

if __name__ == "__main__":  # the supervisor must start before torch is imported
    from rl_dist.launch.supervisor import supervise

    supervise()

import os
import sys
import time

import torch
from own_cores import Decay

import train_distributed
from rl_dist.process_group.process_ends import report
from rl_dist.telemetry import loggers


def act(what):
    where, how, rank = os.environ["ODD"].split()
    if where == what and rank in (os.environ.get("RANK", "0"), "-1"):
        if how == "exit":
            sys.exit(0)
        while True:
            time.sleep(0.1)


def call(moment):
    if moment.metrics["iteration"] == 2:
        act("callback")


class Core(Decay):
    def forward(self, inputs, state):
        # Misbehave in gradient steps only, not when the core is checked.
        if torch.is_grad_enabled():
            act("core")
        return super().forward(inputs, state)


# check_installed needs the name of a package that is installed
loggers.LOGGERS["json"] = lambda *_: (lambda *_: act("logger"), lambda: None)

if __name__ == "__main__":
    code = train_distributed.main()
    report(exit_code=code)
    sys.exit(code)
