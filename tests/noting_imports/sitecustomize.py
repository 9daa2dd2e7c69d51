"""First on the path of a process: notes what modules of ours it imports, in their order."""

import os
import sys
from pathlib import Path


def note(event, args):
    if event == "import" and (
        args[0].split(".")[0] in ("agents", "envs", "rl_dist", *FOREIGN)
        or args[0] == "torch._dynamo"
    ):
        with Path(FOLDER, str(os.getpid())).open("a") as file:
            file.write(f"{args[0]}\n")


FOLDER = os.environ["NOTED_IMPORTS"]
FOREIGN = ("matplotlib", "pandas", "talib", "tensorboard")
sys.addaudithook(note)
