"""Train a recurrent PPO policy on one rank or many.

Run it as `python train_distributed.py --num_gpus N`. The training loop is `train` in
agents/trainer.py; the gradient step is `PPO.update` in agents/ppo.py.
"""

from __future__ import annotations

if __name__ == "__main__":  # before anything slow is imported
    from rl_dist.launch.supervisor import supervise

    supervise()

import sys
from contextlib import ExitStack

from agents.rank import run_rank
from rl_dist.errors import explains_errors, outlive_readers
from rl_dist.flags import ParsedFlags
from rl_dist.launch.supervisor import imports_done
from rl_dist.process_group.process_ends import report


def train_several(parsed: ParsedFlags) -> int:
    """Train once with each of --seeds; return the exit code."""
    from agents.api import seeds

    return seeds.train_several(parsed)


@explains_errors
def main() -> int:
    """Choose a run, start its ranks, and return the exit code."""
    from agents.run.start import prepare

    with ExitStack() as held:  # the run's lock
        run = prepare(held, several_seeds=train_several)
        return run if isinstance(run, int) else run.launch(run_rank)


if __name__ == "__main__":
    imports_done()
    outlive_readers()
    code = main()
    report(exit_code=code)
    sys.exit(code)
