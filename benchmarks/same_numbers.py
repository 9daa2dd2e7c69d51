"""Check that small jobs give the same results, bit for bit, in two checkouts.

    git worktree add ../base COMMIT
    python benchmarks/same_numbers.py ../base [--jobs NAME ...]

Every job runs with the code of the checkout BASE and then with the code of this checkout. The
script compares the records of metrics.jsonl, the newest checkpoint (parameters and optimizer
included) and the figures of summary.json. New entries in the states of environments are ignored.
The script imports nothing from the project and reads all files itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

REPO = Path(__file__).resolve().parents[1]
SIZES = (
    "--device cpu --threads 1 --hidden_size 8 --num_envs 12 --num_steps 16 --bptt_steps 8 "
    "--batch_size 12 --update_epochs 2 --checkpoint_every 1 --monitor_every 0"
)
TRAIN = f"train_distributed.py {SIZES} --total_steps 768"
MARKETS = (
    "--train_end 2015-12-31 --valid_start 2016-01-04 --valid_end 2016-06-30 "
    "--test_start 2019-06-03 --test_end 2019-08-30"
)
WORLDS = "--num_worlds 2 --num_stocks 2 --episode_days 60"
SPACES = "--env examples.many_spaces"
# A job is a list of commands. RUN stands for the run directory to compare, DIR for the folder of
# the job. If "kill" precedes a command, the command is killed after its second iteration.
JOBS: dict[str, list[str]] = {
    "trading on 2 ranks": [
        f"{TRAIN} --num_gpus 2 {MARKETS} {WORLDS} --grad_accumulation 2 --validate_every 2 "
        "--batch_size 6 --run_dir RUN"
    ],
    "daily bars, feature window": [
        f"{TRAIN} --num_gpus 1 --data DIR/prices.csv --train_end 2015-09-30 "
        "--valid_start 2015-10-01 --valid_end 2015-12-31 --test_start 2016-01-04 "
        "--episode_days 60 --feature_window 4 --target_kl 0.001 --clip_vloss --run_dir RUN"
    ],
    "CartPole on 3 ranks": [
        f"{TRAIN} --env CartPole-v1 --num_gpus 3 --policy gru --warmup 2 --validate_every 1 "
        "--ent_coef 0.01 --run_dir RUN"
    ],
    "hybrid, sharded": [
        f"{TRAIN} --env Recall-v0 --num_gpus 2 --strategy hybrid --refresh_states --run_dir RUN"
    ],
    "hybrid, pipeline": [
        f"{TRAIN} {MARKETS} {WORLDS} --num_gpus 2 --strategy hybrid --hybrid_form pipeline "
        "--min_adv_std 0.2 --run_dir RUN"
    ],
    "workers and masks": [
        f"{TRAIN} {SPACES}:Orders-v0 --num_gpus 2 --env_workers 2 "
        "--env_groups 2 --policy mingru --run_dir RUN"
    ],
    "images in fp64": [
        f"{TRAIN} {SPACES}:PatchRecall-v0 --precision fp64 --num_gpus 1 --policy lstm "
        "--previous_action --num_layers 2 --run_dir RUN"
    ],
    "continuous in bf16": [
        f"{TRAIN} --env Pendulum-v1 --precision bf16 --num_gpus 1 "
        "--noise_color 1 --policy lstm --separate_trunks --run_dir RUN"
    ],
    "restarts, kill and resume": [
        f"kill {TRAIN} --env flaky:Flaky-v0 --env_restarts 9 --num_gpus 2 --policy mlp "
        "--run_dir RUN",
        "train_distributed.py --resume RUN",
    ],
    "pre-training, other ranks": [
        f"-m agents.pretrain --num_gpus 2 --device cpu --num_worlds 2 --num_stocks 2 {MARKETS} "
        "--hidden_size 8 --window 20 --batch_size 16 --epochs 2 --no-progress --run_dir DIR/first",
        f"{TRAIN} {MARKETS} {WORLDS} --num_gpus 2 --pretrained DIR/first --run_dir RUN",
        "train_distributed.py --resume RUN --num_gpus 1 --total_steps 1536",
    ],
    "fit on 2 ranks": [
        f"-m agents.pretrain --num_gpus 2 --device cpu --num_worlds 2 --num_stocks 2 {MARKETS} "
        "--hidden_size 8 --window 20 --batch_size 16 --epochs 3 --grad_accumulation 2 "
        "--max_grad_norm 0.5 --no-progress --run_dir RUN"
    ],
}
# keys with these prefixes vary from run to run
NOT_COMPARED = ("time/", "cpu/", "gpu/", "ram/", "config")
FLAKY = """
import gymnasium, numpy as np

class Flaky(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    life = 0

    def reset(self, *, seed=None, options=None):
        self.age = 0
        return self._obs(), {}

    def _obs(self):
        return np.sin([self.life, self.age]).astype(np.float32)

    def step(self, action):
        self.life, self.age = self.life + 1, self.age + 1
        if self.life % 23 == 0:
            raise RuntimeError("fell over")
        return self._obs(), float(action), self.age == 7, False, {}

    def get_state(self):
        return {"life": self.life, "age": self.age}

    def set_state(self, state):
        self.life, self.age = int(state["life"]), int(state["age"])

gymnasium.register("Flaky-v0", entry_point=Flaky)
"""


def write_prices(path: Path) -> None:
    """Write daily bars of two stocks, whose prices are a fixed random walk."""
    generator = torch.Generator().manual_seed(1)
    lines = ["date,tic,open,high,low,close,adj_close,volume"]
    days = [
        f"{y}-{m:02d}-{d:02d}" for y in (2015, 2016) for m in range(1, 13) for d in range(1, 29)
    ]
    for ticker in ("AAA", "BBB"):
        moves = 0.01 * torch.randn(len(days), generator=generator, dtype=torch.float64)
        for day, price in zip(days, (100 * moves.cumsum(0).exp()).tolist(), strict=True):
            prices = f"{price:.4f},{price * 1.01:.4f},{price * 0.99:.4f},{price:.4f},{price:.4f}"
            lines.append(f"{day},{ticker},{prices},1000")
    path.write_text("\n".join(lines) + "\n")


def run_job(tree: Path, commands: list[str], folder: Path) -> Path:
    """Run a job's commands with the code of `tree`; return the run directory."""
    folder.mkdir()
    (folder / "flaky.py").write_text(FLAKY)
    write_prices(folder / "prices.csv")
    run_dir = folder / "run"
    path = f"{tree}:{folder}:{os.environ.get('PYTHONPATH', folder)}"
    for command in commands:
        words = command.replace("RUN", str(run_dir)).replace("DIR", str(folder)).split()
        kill = words[0] == "kill"
        words = words[kill:]
        if words[0].endswith(".py"):
            words[0] = str(tree / words[0])
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=(folder / "output").open("a"),
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        if kill:
            while process.poll() is None and len(read_records(run_dir)) < 2:
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if code and not kill:
            last_line = (folder / "output").read_text().strip().rpartition("\n")[2]
            raise RuntimeError(f"{tree}: {command} exited with code {code}: {last_line}")
    return run_dir


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """Read the records of metrics.jsonl; skip the last line if it is incomplete."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of nested dictionaries and lists with its path."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        yield name, value
    for key, entry in items:
        if not str(key).startswith(NOT_COMPARED):
            yield from flat(entry, f"{name}/{key}")


def result_of(run_dir: Path) -> dict[str, Any]:
    """Read the values to compare: metric records, newest checkpoint and summary."""
    checkpoint = max((run_dir / "checkpoints").glob("iteration_*.pt"))
    state = torch.load(checkpoint, weights_only=True, map_location="cpu")
    summary = run_dir / "summary.json"
    figures = json.loads(summary.read_text()) if summary.exists() else {}
    figures.pop("scaling", None)  # measures speed, which varies
    return dict(flat({"metrics": read_records(run_dir), "state": state, "summary": figures}))


def differences(base: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the paths of values that differ or that exist in only one checkout.

    A value of an environment's snapshot is ignored if it exists only in this checkout.
    """
    return sorted(
        name
        for name in base.keys() | now.keys()
        if name in base or "/environments/" not in name
        if name not in base or name not in now or not _equal(base[name], now[name])
    )


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        bits = [t.contiguous().view(torch.uint8) for t in (left, right) if t.ndim]
        same = left.dtype == right.dtype and left.shape == right.shape
        return same and (torch.equal(*bits) if bits else left.item() == right.item())
    return type(left) is type(right) and (left == right or left != left and right != right)


def main() -> int:
    """Compare all jobs; return 1 if any job differs or fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", type=Path, help="checkout of the commit to compare with")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    args = parser.parse_args()
    if not (args.base / "agents/pretrain.py").exists():
        parser.error(f"{args.base}: not a checkout of this project")
    differing = 0
    for job in args.jobs:
        try:
            with tempfile.TemporaryDirectory() as folder:
                base, now = (
                    result_of(run_job(tree, JOBS[job], Path(folder, name)))
                    for name, tree in (("base", args.base.resolve()), ("now", REPO))
                )
        except RuntimeError as error:  # continue with the other jobs
            print(f"{job}: FAILS, {error}", flush=True)
            differing += 1
            continue
        paths = differences(base, now)
        differing += bool(paths)
        verdict = f"DIFFERS in {len(paths)} values: {', '.join(paths[:5])}" if paths else "equal"
        print(f"{job}: {verdict} ({len(base)} values)", flush=True)
    print(f"{len(args.jobs) - differing} of {len(args.jobs)} jobs are equal")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
