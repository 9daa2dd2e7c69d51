"""Measure the speed of our trainer (`make bench`); compare it with other trainers or checkouts.

    python benchmarks/against_peers.py --peers [--device cuda]
    python benchmarks/against_peers.py --peers --base ../base
    python benchmarks/against_peers.py --python /path/to/venv/bin/python

--base is another checkout of this project, for example `git worktree add ../base COMMIT`. --python
is the Python interpreter of an environment in which the other trainers are installed: rl-games,
skrl and sb3-contrib, together with gymnasium and preferably the version of torch that this project
uses. If a trainer is missing, it is skipped and a line says so. All trainers do the same work with
the same network: an iteration collects 128 steps of 64 environments and trains an LSTM, a tanh
layer and two heads for 4 epochs of 4 minibatches. The learning rate is so low that policies remain
random: learning would change the length of episodes, and thus the speed. The task "main" is our
default training job, which only checkouts of this project run.

Every trainer is a separate process. A turn is one iteration; between its turns, a trainer waits. In
a pair of turns, our trainer and another trainer (a peer) take one turn each; the next pair is in
the opposite order. The ratio of a pair is the time of the peer divided by our time, per environment
step. The output has the median of the ratios with a 95 % interval from a bootstrap.
`part_of_product` is the trainer's GFLOP/s divided by those of a large matrix product, which is
timed before each round of pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from turns import TASKS, describe, median_interval, parser_of, product_gflops

ROOT = Path(__file__).resolve().parents[1]
PEERS = {  # name of a driver: package that it needs
    "rl_games": "rl_games",
    "skrl": "skrl",
    "clean": "gymnasium",
    "sb3": "sb3_contrib",
    "bare": "torch",
}
START_UP_S = 20.0  # part of each task's time that is reserved for start and warm-up


class Program:
    """A process in a new session (setsid); it is killed when the context `held` exits."""

    def __init__(self, held: ExitStack, command: list[str], **options: Any) -> None:
        # `held` closes this file.
        self.errors = held.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stderr=self.errors, start_new_session=True, **options
        )
        held.callback(self.process.wait)
        held.callback(self.signal, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def last_line(self) -> str:
        """Return the last line that the program wrote to stderr."""
        self.errors.seek(0)
        return self.errors.read().strip().rpartition("\n")[2]


class Trainer(Program):
    """The process of one trainer, which trains one iteration per turn."""

    def __init__(
        self, held: ExitStack, python: str, *arguments: str | int, root: Path = ROOT
    ) -> None:
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # a killed driver leaves files in TMPDIR
        environment = os.environ | {"TMPDIR": held.enter_context(folder)}
        inherited = os.environ.get("PYTHONPATH", "") if python == sys.executable else ""
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), inherited)))
        super().__init__(
            held,
            [python, str(root / "benchmarks/peers.py"), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        self.about: dict[str, Any] = {}

    def turn(self) -> dict[str, Any]:
        """Let the driver train one iteration; return its measurements."""
        assert self.process.stdin
        with suppress(BrokenPipeError):  # the driver has ended; report() raises the error
            self.process.stdin.write("go\n")
        return self.report()

    def report(self) -> dict[str, Any]:
        """Wait for the driver's report; raise RuntimeError if the driver has ended."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self.last_line())
        report: dict[str, Any] = json.loads(line)
        self.about |= {name: report.pop(name) for name in ("trainer", "torch") if name in report}
        return report


def installed(python: str) -> set[str]:
    """Return the peers whose packages a Python interpreter can import."""
    script = "import sys, importlib.util as u; print(*[n for n in sys.argv[1:] if u.find_spec(n)])"
    command = [python, "-c", script, *PEERS.values()]
    present = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return {driver for driver, package in PEERS.items() if package in present}


def step_s(task: str, turn: dict[str, Any]) -> float:
    """Return the seconds per environment step of a turn."""
    return turn["seconds"] / turn.get("steps", TASKS[task].steps)


def row_of(
    task: str, about: dict[str, Any], turns: list[dict[str, Any]], product: float
) -> dict[str, Any]:
    """Return a row of medians: speeds, seconds per phase, length of episodes."""
    steps_per_s = 1 / median(step_s(task, turn) for turn in turns)
    gflops = TASKS[task].train_flops / TASKS[task].steps * steps_per_s / 1e9
    row = {"task": task, **about, "turns": len(turns)}
    row |= {"steps_per_s": round(steps_per_s), "gflops": round(gflops, 1)}
    row["part_of_product"] = round(gflops / product, 3)
    for name in ("collect_s", "update_s", "episode_length", "peak_gib"):
        values = [turn[name] for turn in turns if turn.get(name) is not None]
        row[name] = round(median(values), 3) if values else None
    return row


def compare(task: str, peers: list[str], args: argparse.Namespace) -> None:
    """Let all trainers take turns on a task, after a warm-up; print the results."""
    with ExitStack() as held:
        flags = (task, "--threads", args.threads, "--device", args.device)
        of_ours = (sys.executable, "ours", *flags, "--ranks", args.ranks)
        ours = Trainer(held, *of_ours)
        trainers = {name: Trainer(held, args.python, name, *flags) for name in peers}
        if args.base:
            trainers["base"] = Trainer(held, *of_ours, root=args.base.resolve())
        for name, trainer in {"ours": ours, **trainers}.items():
            try:
                trainer.report()
                for _ in range(args.warm_up):
                    trainer.turn()
            except RuntimeError as error:
                if trainer is ours:
                    raise
                print(json.dumps({"task": task, "skipped": name, "reason": str(error)}))
                del trainers[name]
        until = time.monotonic() + 60.0 * args.minutes / len(args.tasks) - START_UP_S
        trainers = trainers or {"ours": ours}  # without a peer, ours takes all turns
        pairs: dict[str, list[dict[Trainer, dict[str, Any]]]] = {name: [] for name in trainers}
        products: list[float] = []
        while len(products) < args.fewest or time.monotonic() < until:
            products.append(product_gflops(args.device))
            for name, trainer in trainers.items():
                order = [ours, trainer] if len(products) % 2 else [trainer, ours]
                pairs[name].append({taking: taking.turn() for taking in dict.fromkeys(order)})
        our_turns = [pair[ours] for peer_pairs in pairs.values() for pair in peer_pairs]
        product = median(products)
        print(json.dumps(row_of(task, ours.about, our_turns, product)), flush=True)
        trainers.pop("ours", None)
        for name, trainer in trainers.items():
            turns = [pair[trainer] for pair in pairs[name]]
            if name == "base":
                trainer.about["trainer"] = str(args.base)
            row = row_of(task, trainer.about, turns, product)
            ratios = [step_s(task, p[trainer]) / step_s(task, p[ours]) for p in pairs[name]]
            print(json.dumps(row | {"ours is faster": median_interval(ratios, 2)}), flush=True)


def main() -> None:
    """Compare the trainers on each task."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--python", default=sys.executable, help="Python interpreter with the other trainers"
    )
    parser.add_argument(
        "--peers", nargs="*", default=list(PEERS), choices=PEERS, help="other trainers"
    )
    parser.add_argument("--base", type=Path, help="checkout of this project, compared as a peer")
    tasks = ["cartpole", "stocks", "main"]
    parser.add_argument("--tasks", nargs="+", default=tasks, choices=TASKS)
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="duration in minutes, all tasks together"
    )
    parser.add_argument("--fewest", type=int, default=4, help="smallest number of pairs per peer")
    parser.add_argument(
        "--warm_up", type=int, default=2, help="turns of each trainer before the first pair"
    )
    parser.add_argument("--threads", type=int, default=2, help="number of threads of each trainer")
    parser.add_argument(
        "--ranks", type=int, default=1, help="number of ranks of our trainer; they share --threads"
    )
    args = parser.parse_args()
    if min(args.threads, args.ranks, args.fewest) < 1 or args.threads % args.ranks:
        parser.error("--threads, --ranks and --fewest: 1 or more; ranks share the threads equally")
    parts = ("agents/rank.py", "benchmarks/peers.py")
    if args.base and not all((args.base / part).exists() for part in parts):
        # Otherwise, an installed copy of this project would run instead.
        parser.error(f"--base {args.base}: not a checkout of this project")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    if not shutil.which(args.python):
        parser.error(f"--python {args.python}: no such program")
    torch.set_num_threads(args.threads)
    print(json.dumps(describe(args.threads, args.device) | {"ranks": args.ranks}))
    present = installed(args.python)
    for name in set(args.peers) - present:
        print(json.dumps({"skipped": name, "reason": f"{PEERS[name]} is not installed"}))
    for task in args.tasks:
        peers = [name for name in args.peers if (name == "bare") == TASKS[task].many]
        compare(task, [name for name in peers if name in present and task != "main"], args)


if __name__ == "__main__":
    main()
