"""Print the size of the house in one table: lines, modules, imports, longest file and function.

python benchmarks/house.py [--modules]

--modules trains for a moment and counts the modules of the packages that this loads.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from source_tree import PACKAGES, Source, length, line_counts, read_sources, unit_counts

ROOT = Path(__file__).resolve().parents[1]
TINY = "--env CartPole-v1 --device cpu --num_envs 4 --num_steps 16 --bptt_steps 8 --batch_size 4"
BRIEFLY = "--hidden_size 8 --total_steps 64 --validate_every 0 --eval_episodes 1"


def loaded_modules() -> int:
    """Number of our modules that a plain training of one rank imports."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*TINY.split(), *BRIEFLY.split(), "--run_dir", folder]
        command = [sys.executable, "-v", "train_distributed.py", *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
        )
    imported = {line.split()[1] for line in done.stderr.splitlines() if line.startswith("import ")}
    names = {name.strip("'") for name in imported}
    return sum(name.split(".")[0] in PACKAGES for name in names)


def table(sources: list[Source]) -> list[tuple[str, str]]:
    """The rows: what is counted, and how many."""
    rows = [(f"lines: {name}", f"{count:,}") for name, count in line_counts(sources).items()]
    shipped = [source for source in sources if source.shipped]
    rows.append(("modules", str(len(shipped))))
    for package in PACKAGES:
        counts = unit_counts(sources, package)
        rows.append(
            (f"{package}: units, imports between them, layers", ", ".join(map(str, counts)))
        )
    file = max(shipped, key=lambda source: source.num_lines)
    rows.append(("longest file", f"{file.num_lines}, {file.path}"))
    functions = [(length(node), node.name, s.path) for s in shipped for node in s.functions()]
    lines, name, path = max(functions)
    rows.append(("longest function", f"{lines}, {name} in {path}"))
    return rows


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--modules", action="store_true", help="count what a plain training loads")
    args = parser.parse_args()
    rows = table(read_sources(ROOT))
    if args.modules:
        rows.append(("modules loaded by a plain training", str(loaded_modules())))
    for name, value in rows:
        print(f"{name:<48}{value}")


if __name__ == "__main__":
    main()
