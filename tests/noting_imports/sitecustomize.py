"""Record which modules a process imports; Python runs this file when it starts.

Each process writes the imported modules of PACKAGES to a file named after its process id.
"""

import os
import sys
from pathlib import Path

PACKAGES = ("agents", "envs", "rl_dist", "matplotlib", "pandas", "talib")


class ImportRecorder:
    """Import finder that records module names and leaves the import to other finders."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in PACKAGES or name == "torch._dynamo":
            with Path(os.environ["NOTED_IMPORTS"], str(os.getpid())).open("a") as file:
                file.write(f"{name}\n")


sys.meta_path.insert(0, ImportRecorder)
