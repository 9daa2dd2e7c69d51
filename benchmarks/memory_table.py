"""Train memory tasks with several seeds and print their table beside published figures.

    pip install -e '.[popgym]'
    python benchmarks/memory_table.py --seeds 1 2 3 [--rows RepeatFirstEasy Recall] [--out DIR]

Each row and seed is one command of train_distributed.py, which is printed before it runs. What has
a result in --out is not run again unless its command has changed, so that a table may be made in
parts; --print_only runs nothing. The columns:

- without noise: mean return of the 100 episodes that end a training, with the last weights;
- training: the highest mean return of episodes in 16,384 steps in a row of the training, with
  noise: near to what POPGym's authors report, whose batches have 65,536 steps;
- minutes: wall time of the whole command, from start to result.

Each is the mean over seeds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = "benchmarks.published_tasks"
COMMON = "--preset memory --num_gpus 1 --device cpu --threads 1 --validate_every 0"
WINDOW = 16_384  # steps over which the return of training is averaged
POPGYM = "P"  # by which the table names a source
POC = "M"
ZOO = "Z"
SOURCES = {
    POPGYM: "Morad et al., ICLR 2023 ([arXiv 2303.01859](https://arxiv.org/abs/2303.01859)), "
    "Table 3: 15 M steps, 3 trials, RLlib's PPO; column *training*. Taken from a transcription",
    ZOO: "[sb3/ppo_lstm-CartPoleNoVel-v1](https://huggingface.co/sb3/ppo_lstm-CartPoleNoVel-v1) of "
    "RL Zoo: tuned RecurrentPPO, 100,000 steps, one run",
    POC: "[MarcoMeter/recurrent-ppo-truncated-bptt]"
    "(https://github.com/MarcoMeter/recurrent-ppo-truncated-bptt): the ends of 10 runs in its "
    "event files",
}


@dataclass(frozen=True)
class Row:
    """A task, how it is trained, and what others have published."""

    task: str
    env: str
    steps: int
    flags: str = ""  # beyond the preset
    published: str = "-"

    @property
    def name(self) -> str:
        """What --rows chooses by."""
        return f"{self.task} {self.flags}".strip()

    def command(self, seed: int) -> list[str]:
        """The training command, without the place where it writes."""
        words = f"train_distributed.py --env {self.env} --total_steps {self.steps} {COMMON}"
        return [*shlex.split(f"{words} {self.flags}"), "--seed", str(seed)]


def popgym(task: str, steps: int, published: str, flags: str = "") -> Row:
    """A task of POPGym."""
    return Row(task, f"popgym:popgym-{task}-v0", steps, flags, published)


NOW = "--gamma 0"  # where every reward is for the action just taken
CORE = "--policy own --core examples.phase_core:PhaseCore"
ROWS = [
    popgym("RepeatFirstEasy", 300_000, f"GRU 1.000 {POPGYM}"),
    popgym("RepeatPreviousEasy", 300_000, f"GRU 1.000 {POPGYM}"),
    popgym("RepeatPreviousEasy", 100_000, f"GRU 1.000 {POPGYM}", NOW),
    popgym("RepeatPreviousMedium", 60_000, f"GRU -0.315, LMU (best) 0.789 {POPGYM}"),
    popgym(
        "RepeatPreviousMedium",
        60_000,
        f"GRU -0.315, LMU (best) 0.789 {POPGYM}",
        f"{NOW} --bptt_steps 128",
    ),
    popgym(
        "RepeatPreviousMedium",
        60_000,
        f"GRU -0.315, LMU (best) 0.789 {POPGYM}",
        f"{NOW} --bptt_steps 128 {CORE}",
    ),
    popgym("CountRecallEasy", 300_000, f"GRU 0.177, LSTM (best) 0.509 {POPGYM}", NOW),
    popgym("AutoencodeEasy", 60_000, f"GRU (best) -0.283 {POPGYM}"),
    popgym(
        "AutoencodeEasy",
        300_000,
        f"GRU (best) -0.283 {POPGYM}",
        f"{NOW} --bptt_steps 128 {CORE}",
    ),
    popgym("HigherLowerEasy", 60_000, f"GRU (best) 0.529 {POPGYM}"),
    popgym("PositionOnlyCartPoleEasy", 60_000, f"GRU 1.000 {POPGYM}"),
    popgym("PositionOnlyCartPoleMedium", 60_000, f"GRU 1.000 {POPGYM}"),
    popgym("NoisyPositionOnlyCartPoleEasy", 300_000, f"GRU (best) 0.995 {POPGYM}"),
    # this environment asks for the action before (its obs_requires_prev_action)
    popgym(
        "MultiarmedBanditEasy",
        300_000,
        f"GRU 0.619, Elman (best) 0.631 {POPGYM}",
        "--previous_action",
    ),
    Row(
        "PocMemory",
        f"{PUBLISHED}:PocMemory-v0",
        60_000,
        "",
        f"1.17 to 1.24 in 61,440 steps {POC}",
    ),
    Row(
        "CartPole without velocities",
        "CartPolePositions-v1",
        40_000,
        """--env_kwargs '{"max_episode_steps": 200}'""",
        f"187 to 197 in 409,600 steps {POC}",
    ),
    Row("CartPole without velocities", "CartPolePositions-v1", 100_000, "", f"500 {ZOO}"),
    Row("MemoryLength, 30 steps", f"{PUBLISHED}:MemoryLength-v0", 40_000),
    Row(
        "MemoryLength, 30 steps",
        f"{PUBLISHED}:MemoryLength-v0",
        40_000,
        "--gae_lambda 0.98",
    ),
    Row("Recall", "Recall-v0", 40_000),
    Row("PatchRecall", "examples.many_spaces:PatchRecall-v0", 100_000),
    Row("Orders", "examples.many_spaces:Orders-v0", 200_000),
]


def best_window(metrics: Sequence[dict[str, Any]]) -> float | None:
    """The highest mean return of episodes in WINDOW steps of training; None: there were none."""
    best = None
    first, total, count = 0, 0.0, 0.0
    for each in metrics:
        if each["episode/count"]:
            total += each["episode/return"] * each["episode/count"]
            count += each["episode/count"]
        is_whole = each["global_step"] - first >= WINDOW
        if count and (is_whole or (best is None and each is metrics[-1])):
            best = total / count if best is None else max(best, total / count)
        if is_whole:
            first, total, count = each["global_step"], 0.0, 0.0
    return best


def train(command: list[str], run_dir: Path) -> dict[str, Any]:
    """Run a training and return its figures."""
    shutil.rmtree(run_dir, ignore_errors=True)
    begin = time.monotonic()
    run = [sys.executable, *command, "--run_dir", str(run_dir.absolute())]
    done = subprocess.run(run, cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"error: the training ended with code {done.returncode}")
    minutes = (time.monotonic() - begin) / 60
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {
        "command": command,
        "without_noise": summary["test"]["return"],
        "training": best_window([json.loads(line) for line in lines]),
        "minutes": minutes,
        "steps": summary["global_step"],
        "parameter_sha256": summary["parameter_sha256"],
    }


def spread(values: Sequence[float | None], digits: int = 3) -> str:
    """The mean with the smallest and the largest."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, mean, high = (f"{v:.{digits}g}" for v in (min(known), sum(known) / len(known), max(known)))
    return mean if low == high else f"{mean} ({low} to {high})"


def table(rows: Sequence[Row], found: dict[str, list[dict[str, Any]]]) -> str:
    """The table in Markdown, of the rows that have results."""
    heads = ("task", "flags", "steps", "seeds", "without noise", "training", "published", "minutes")
    lines = [heads, ("---",) * len(heads)]
    for row in rows:
        results = found[row.name]
        if not results:
            continue
        parts = {
            name: [each[name] for each in results]
            for name in ("without_noise", "training", "minutes")
        }
        lines.append(
            (
                row.task,
                f"`{row.flags}`" if row.flags else "",
                f"{row.steps:,}",
                str(len(results)),
                spread(parts["without_noise"]),
                spread(parts["training"]),
                row.published,
                spread(parts["minutes"], 2),
            )
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def stored(path: Path, command: list[str]) -> dict[str, Any] | None:
    """The result in a file, if it is of this very command."""
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result if result["command"] == command else None


def place(out: Path, row: Row, seed: int) -> Path:
    """The file of a result."""
    return out / f"{re.sub('[^a-zA-Z0-9]+', '_', row.name)}.{seed}.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", nargs="+", default=[], help="parts of names; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/memory_table"))
    parser.add_argument("--print_only", action="store_true", help="of what --out has")
    args = parser.parse_args(argv)
    rows = [row for row in ROWS if not args.rows or any(part in row.name for part in args.rows)]
    found: dict[str, list[dict[str, Any]]] = {row.name: [] for row in rows}
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for row in rows:
            command = row.command(seed)
            path = place(args.out, row, seed)
            result = stored(path, command)
            if result is None and not args.print_only:
                print("python", shlex.join(command), flush=True)
                result = train(command, path.with_suffix(""))
                path.write_text(json.dumps(result, indent=2) + "\n")
                print(f"  {result['without_noise']:.3f}, {result['minutes']:.1f} min", flush=True)
            if result:
                found[row.name].append(result)
    print(table(rows, found))
    for name, source in SOURCES.items():
        print(f"\n{name}: {source}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
