"""Commands:
  train     train a policy, or continue a run
  evaluate  evaluate trained policies
  export    write a policy to one ONNX file
  check     check whether this machine can train; estimate the time
  speedup   estimate the speed on more GPUs
  status    show what a run is doing

clstm-ppo COMMAND --help shows the flags of a command.
"""  # noqa: D205

import runpy
import sys
from pathlib import Path

COMMANDS = {
    "train": "train_distributed",
    "evaluate": "agents.evaluate",
    "export": "agents.export",
    "check": "check_gpu_setup",
    "speedup": "rl_dist.speedup",
    "status": "rl_dist.status",
}


def main() -> None:
    """Run the command whose name is the first argument.

    This file must not import torch, because `train` starts its supervisor before it imports torch.
    """
    # A folder on the user's PYTHONPATH may have the same name as one of our packages. The line
    # below makes Python search the folder of this file first.
    sys.path.insert(0, str(Path(__file__).absolute().parent))
    from agents import __version__
    from rl_dist.errors import CommandParser

    usage = "%(prog)s COMMAND [--flag value ...]"
    parser = CommandParser(prog="clstm-ppo", usage=usage, description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    command = parser.parse_args(sys.argv[1:2] or ["--help"]).command
    module = COMMANDS[command]
    # Help texts mention the module, for example `python -m rl_dist.status`. Show the command that
    # the user has typed instead, for example `clstm-ppo status`.
    pattern = rf"(python )?(-m )?(?<!/){module}(\.py)?"
    CommandParser.renamed = pattern, f"clstm-ppo {command}"
    del sys.argv[1]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
