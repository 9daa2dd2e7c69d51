"""Train memory tasks with several seeds; print results next to published figures.

    pip install -e '.[popgym]'
    python benchmarks/memory_table.py --seeds 1 2 3 [--rows RepeatFirstEasy Recall] [--out DIR]

For each row and seed, one train_distributed.py command is printed and run. Its result is stored in
--out and reused until the command changes, so a table can be made in several calls. The columns:

- without noise: mean return of the final weights in 100 evaluation episodes without action noise;
- training: mean return of training episodes, with action noise, in the best window of 16,384 steps.
  POPGym's authors report a similar figure, but for windows of 65,536 steps;
- minutes: wall time of the whole command.

Each cell is the mean over seeds, with the smallest and the largest value in brackets. This file
also registers two published tasks, `benchmarks.memory_table:PocMemory-v0` and
`benchmarks.memory_table:MemoryLength-v0`.
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
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # can be started from any directory

import gymnasium
import numpy as np
from gymnasium import spaces

from envs.vector.batched import BatchedEnv, Outcome, SingleEnv

ROOT = Path(__file__).resolve().parents[1]
COMMON = "--preset memory --num_gpus 1 --device {device} --threads 1 --validate_every 0"
WINDOW = 16_384  # number of steps over which training returns are averaged
# sources of the published figures, by the letter that marks them in the table
SOURCES = {
    "P": "Morad et al., ICLR 2023 ([arXiv 2303.01859](https://arxiv.org/abs/2303.01859)), "
    "Table 3: 15 M steps, 3 trials, RLlib's PPO; column *training*. Taken from a transcription",
    "Z": "[sb3/ppo_lstm-CartPoleNoVel-v1](https://huggingface.co/sb3/ppo_lstm-CartPoleNoVel-v1) of "
    "RL Zoo: tuned RecurrentPPO, 100,000 steps, one run",
    "M": "[MarcoMeter/recurrent-ppo-truncated-bptt]"
    "(https://github.com/MarcoMeter/recurrent-ppo-truncated-bptt); final returns of 10 runs, "
    "read from its event files",
}
FROZEN_STEPS = 2  # number of steps in which PocMemory shows the signs
END_PLACE = 5  # distance of each end from the middle of the corridor, in steps of 0.2
FARTHEST_START = 2  # an episode begins at most this many steps from the middle
PRIZE = 1.6
STEP_COST = 0.1


class PocMemoryVectorEnv(BatchedEnv):
    """PocMemory-v0: only the first steps show which end of a corridor is good.

    Each observation has the left sign, the position and the right sign, [B, 3]. For two steps, the
    agent cannot move and sees the signs of both ends: +1 for the good end, -1 for the bad end. Then
    the agent walks and sees only its position. A step costs 0.1, the good end earns 1.6, and the
    bad end costs 1.6. The episode terminates at either end. The best possible mean return is 1.2.

    Source of the rules: MarcoMeter/recurrent-ppo-truncated-bptt, environments/poc_memory_env.py,
    with freeze=True, as in the experiments of that project.
    """

    state_names = ("place", "right")

    def __init__(self, num_envs: int = 1) -> None:
        super().__init__(num_envs, spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2))
        self.place = np.zeros(num_envs, dtype=np.int64)  # positions, from -END_PLACE to END_PLACE
        self.right = np.ones(num_envs, dtype=np.int64)  # sign of the end on the right

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Choose a random start place and a random sign for the end on the right."""
        start = generator.integers(-FARTHEST_START, FARTHEST_START + 1)
        good = generator.integers(2)
        return np.array([start, 2 * good - 1], dtype=np.float64)

    def begin(self, rows: np.ndarray, draws: np.ndarray) -> None:
        """Start new episodes."""
        self.place[rows], self.right[rows] = draws.T.astype(np.int64)

    def observe(self) -> np.ndarray:
        """Return the observations."""
        signs = self.right * (self.elapsed <= FROZEN_STEPS)
        return np.stack([-signs, self.place / END_PLACE, signs], axis=1).astype(np.float32)

    def advance(self, actions: np.ndarray) -> Outcome:
        """Move every agent: action 0 walks left, action 1 walks right."""
        walks = self.elapsed >= FROZEN_STEPS
        self.place += np.where(actions == 1, 1, -1) * walks
        over = np.abs(self.place) == END_PLACE
        at_good = np.sign(self.place) == self.right
        rewards = np.where(over, np.where(at_good, PRIZE, -PRIZE), -STEP_COST * walks)
        return rewards, over


class MemoryLengthVectorEnv(BatchedEnv):
    """MemoryLength-v0: remember one bit for some steps, as in bsuite's memory_len.

    Each observation has the time left, the query and the bit, [B, 3]. The first observation is
    shown twice and contains the bit as -1 or +1. The last action of the episode earns 1 if it names
    the bit, otherwise -1.

    Source of the rules: google-deepmind/bsuite, bsuite/environments/memory_chain.py, with one bit.
    """

    state_names = ("bit",)

    def __init__(self, num_envs: int = 1, *, length: int = 30) -> None:
        low = np.array([0.0, 0.0, -1.0], np.float32)
        super().__init__(num_envs, spaces.Box(low, np.ones_like(low)), spaces.Discrete(2))
        self.length = length
        self.bit = np.zeros(num_envs, dtype=np.int64)

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Choose a random bit, which the agent has to remember."""
        return generator.integers(2, size=1).astype(np.float64)

    def begin(self, rows: np.ndarray, draws: np.ndarray) -> None:
        """Start new episodes."""
        self.bit[rows] = draws[:, 0].astype(np.int64)

    def observe(self) -> np.ndarray:
        """Return the observations; as in the original task, they lag by one step."""
        shown = np.maximum(self.elapsed - 1, 0)
        obs = np.zeros((self.num_envs, 3), dtype=np.float32)  # with one bit the query is always 0
        obs[:, 0] = 1.0 - shown / self.length
        obs[:, 2] = np.where(shown == 0, 2 * self.bit - 1, 0)
        return obs

    def advance(self, actions: np.ndarray) -> Outcome:
        """Reward the action of the last step only."""
        over = self.elapsed == self.length
        rewards = np.where(actions == self.bit, 1.0, -1.0) * over
        return rewards, over


BATCHES: dict[str, Any] = {
    "PocMemory-v0": PocMemoryVectorEnv,
    "MemoryLength-v0": MemoryLengthVectorEnv,
}
for env_id, batch in BATCHES.items():
    gymnasium.register(env_id, entry_point=partial(SingleEnv, batch), vector_entry_point=batch)


@dataclass(frozen=True)
class Row:
    """A row of the table: a task, its training flags, and published figures."""

    task: str
    env: str
    steps: int
    published: str = "-"
    flags: str = ""  # flags in addition to COMMON

    @property
    def name(self) -> str:
        """Name of the row; --rows selects rows by parts of this name."""
        return f"{self.task} {self.flags}".strip()

    def command(self, seed: int, device: str = "cpu") -> list[str]:
        """Return the training command without --run_dir."""
        common = COMMON.format(device=device)
        flags = f"--env {self.env} --total_steps {self.steps} {common} {self.flags} --seed {seed}"
        return ["train_distributed.py", *shlex.split(flags)]


def popgym(task: str, steps: int, published: str, flags: str = "") -> Row:
    """Return the table row for a POPGym task."""
    return Row(task, f"popgym:popgym-{task}-v0", steps, f"{published} P", flags)


NOW = "--gamma 0"  # every reward depends only on the action just taken
WHOLE = f"{NOW} --bptt_steps 128"  # a training sequence holds a whole episode
CORE = f"{WHOLE} --policy own --core examples.phase_core:PhaseCore"
MEDIUM = "GRU -0.315, LMU (best) 0.789"
LENGTH = "benchmarks.memory_table:MemoryLength-v0"
POSITIONS = "CartPolePositions-v1"
ROWS = [
    popgym("RepeatFirstEasy", 300_000, "GRU 1.000"),
    popgym("RepeatPreviousEasy", 300_000, "GRU 1.000"),
    popgym("RepeatPreviousEasy", 100_000, "GRU 1.000", NOW),
    popgym("RepeatPreviousMedium", 60_000, MEDIUM),
    popgym("RepeatPreviousMedium", 60_000, MEDIUM, WHOLE),
    popgym("RepeatPreviousMedium", 60_000, MEDIUM, CORE),
    popgym("CountRecallEasy", 300_000, "GRU 0.177, LSTM (best) 0.509", NOW),
    popgym("AutoencodeEasy", 60_000, "GRU (best) -0.283"),
    popgym("AutoencodeEasy", 300_000, "GRU (best) -0.283", CORE),
    popgym("HigherLowerEasy", 60_000, "GRU (best) 0.529"),
    popgym("PositionOnlyCartPoleEasy", 60_000, "GRU 1.000"),
    popgym("PositionOnlyCartPoleMedium", 60_000, "GRU 1.000"),
    popgym("NoisyPositionOnlyCartPoleEasy", 300_000, "GRU (best) 0.995"),
    # This environment sets obs_requires_prev_action, so its policies must see the previous action.
    popgym("MultiarmedBanditEasy", 300_000, "GRU 0.619, Elman (best) 0.631", "--previous_action"),
    Row(
        "PocMemory",
        "benchmarks.memory_table:PocMemory-v0",
        60_000,
        "1.17 to 1.24 in 61,440 steps M",
    ),
    Row(
        "CartPole without velocities",
        POSITIONS,
        40_000,
        "187 to 197 in 409,600 steps M",
        """--env_kwargs '{"max_episode_steps": 200}'""",
    ),
    Row("CartPole without velocities", POSITIONS, 100_000, "500 Z"),
    Row("MemoryLength, 30 steps", LENGTH, 40_000),
    Row("MemoryLength, 30 steps", LENGTH, 40_000, flags="--gae_lambda 0.98"),
    Row("Recall", "Recall-v0", 40_000),
    Row("PatchRecall", "examples.many_spaces:PatchRecall-v0", 100_000),
    Row("Orders", "examples.many_spaces:Orders-v0", 200_000),
]


def best_window(metrics: Sequence[dict[str, Any]]) -> float | None:
    """Divide a run into windows of WINDOW steps; return the largest mean return of a window.

    Return None if no episode has ended.
    """
    means: list[float] = []
    first_step, total, count = 0, 0.0, 0.0
    for record in metrics:
        total += (record["episode/return"] or 0.0) * record["episode/count"]
        count += record["episode/count"]
        is_whole = record["global_step"] - first_step >= WINDOW
        if count and (is_whole or (not means and record is metrics[-1])):
            means.append(total / count)
        if is_whole:
            first_step, total, count = record["global_step"], 0.0, 0.0
    return max(means, default=None)


def train(command: list[str], run_dir: Path) -> dict[str, Any]:
    """Run a training command and return its results."""
    shutil.rmtree(run_dir, ignore_errors=True)
    began_s = time.monotonic()
    arguments = [sys.executable, *command, "--run_dir", str(run_dir.absolute())]
    done = subprocess.run(arguments, cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"error: the training exited with code {done.returncode}")
    minutes = (time.monotonic() - began_s) / 60
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {
        "command": command,
        "without_noise": summary["test"]["return"],
        "training": best_window([json.loads(line) for line in lines]),
        "minutes": minutes,
        "steps": summary["global_step"],
    }


def spread(results: Sequence[dict[str, Any]], name: str, digits: int = 3) -> str:
    """Return the mean, smallest and largest value of one result as text."""
    values = [result[name] for result in results if result[name] is not None]
    if not values:
        return "-"
    figures = (min(values), sum(values) / len(values), max(values))
    low, mean, high = (f"{value:.{digits}g}" for value in figures)
    return mean if low == high else f"{mean} ({low} to {high})"


def table_row(row: Row, results: Sequence[dict[str, Any]]) -> str:
    """Return a row of the table in Markdown."""
    cells = (
        row.task,
        row.flags and f"`{row.flags}`",
        f"{row.steps:,}",
        str(len(results)),
        spread(results, "without_noise"),
        spread(results, "training"),
        row.published,
        spread(results, "minutes", 2),
    )
    return f"| {' | '.join(cells)} |"


def stored(path: Path, command: list[str]) -> dict[str, Any] | None:
    """Return the result stored in a file if `command` produced it, otherwise None."""
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result if result["command"] == command else None


def result_path(out: Path, row: Row, seed: int) -> Path:
    """Return the path of the file with the result for one row and one seed."""
    return out / f"{re.sub('[^a-zA-Z0-9]+', '_', row.name)}.{seed}.json"


def main(argv: Sequence[str] | None = None) -> None:
    """Train each row with each seed unless a result is stored; print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--rows", nargs="+", default=[""], help="rows with any of these in their name; default: all"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/memory_table"))
    parser.add_argument("--print_only", action="store_true", help="only print the stored results")
    args = parser.parse_args(argv)
    rows = [row for row in ROWS if any(part in row.name for part in args.rows)]
    results: dict[str, list[dict[str, Any]]] = {row.name: [] for row in rows}
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for row in rows:
            command, path = row.command(seed, args.device), result_path(args.out, row, seed)
            result = stored(path, command)
            if result is None and not args.print_only:
                print("python", shlex.join(command), flush=True)
                result = train(command, path.with_suffix(""))
                path.write_text(json.dumps(result, indent=2) + "\n")
                print(f"  {result['without_noise']:.3f}, {result['minutes']:.1f} min", flush=True)
            if result:
                results[row.name].append(result)
    print("| task | flags | steps | seeds | without noise | training | published | minutes |")
    print("|" + "---|" * 8)
    for row in rows:
        if results[row.name]:
            print(table_row(row, results[row.name]))
    for name, source in SOURCES.items():
        print(f"\n{name}: {source}.")


if __name__ == "__main__":
    main()
