"""Record which modules a process imports; Python runs this file at its start.

The names of modules in PACKAGES are written to a file, in the order of import.
"""

import os
import sys
from pathlib import Path

PACKAGES = ("agents", "envs", "rl_dist", "matplotlib", "pandas", "talib")


class Noting:
    """Import finder that only records names; later finders find the modules."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in PACKAGES or name == "torch._dynamo":
            with Path(os.environ["NOTED_IMPORTS"], str(os.getpid())).open("a") as file:
                file.write(f"{name}\n")


sys.meta_path.insert(0, Noting)
