"""Train a recurrent PPO policy on one or more ranks.

Run it as `python train_distributed.py --num_gpus N`. `train` in agents/learner/trainer.py contains
the training loop; `PPO.step` in agents/learner/ppo.py takes a gradient step.
"""

if __name__ == "__main__":  # fork before the imports that only the child needs
    from rl_dist.launch.supervisor import supervise

    supervise()

import sys

from agents.rank import run_rank
from agents.run.choice import ask_user, parse_training
from agents.run.start import start
from rl_dist.errors import explains_errors, outlive_readers
from rl_dist.launch.supervisor import imports_done
from rl_dist.process_group.process_ends import report


@explains_errors
def main() -> int:
    """Start one run, or one run per seed if --seeds is given; return the exit code."""
    parsed = parse_training()
    if parsed.configs["run"].interactive:
        parsed = ask_user(parsed, sys.argv[1:])
    if parsed.configs["run"].seeds:
        from agents.api import train_several

        return train_several(parsed)
    return start(parsed, run_rank).exit_code


if __name__ == "__main__":
    imports_done()
    outlive_readers()
    code = main()
    report(exit_code=code)
    sys.exit(code)
