"""Export a trained policy for other runtimes, and check it there at once.

python -m agents.export RUN_DIR_OR_CHECKPOINT --format onnx|pt2|safetensors [--output DIR]
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

from agents.export.check import BATCHES, NUM_STEPS, TOLERANCE, largest_difference, latencies
from agents.export.contract import file_hash, make_card, make_contract
from agents.export.formats import FORMATS
from agents.export.step import ExportedStep
from agents.run.saved import LoadedAgent, load_agent
from rl_dist.errors import CommandParser, UserError, explains_errors

RUNTIMES = {"onnx": "onnxruntime", "pt2": "torch", "safetensors": "numpy"}
CONTRACT, CARD = "contract.json", "README.md"
EPILOG = """examples:
  python -m agents.export runs/my_run --format onnx
  python -m agents.export runs/my_run --format safetensors --output my_policy
exit codes: 0 done, 1 the exported policy differs or cannot be made, 2 bad usage"""
HOW_TO_RUN = {
    "onnx": """import gymnasium, numpy as np, onnxruntime

session = onnxruntime.InferenceSession("policy.onnx")
policy = lambda *inputs: session.run(None, dict(zip(("obs", "state", "episode_start"), inputs)))""",
    "pt2": """import gymnasium, numpy as np, torch

module = torch.export.load("policy.pt2").module()
policy = lambda *inputs: [each.numpy() for each in module(*map(torch.from_numpy, inputs))]""",
    "safetensors": """import gymnasium, numpy as np
from numpy_policy import NumpyPolicy

policy = NumpyPolicy("policy.safetensors")""",
}


def export(agent: LoadedAgent, kind: str, folder: Path) -> tuple[Path, dict]:
    """Write a policy with its contract and its card, and check it in its runtime.

    Returns the policy's file and the contract. A file that differs from the policy is removed, and
    refused.
    """
    if kind == "safetensors" and agent.config.policy.core:
        raise UserError(
            f"format safetensors cannot hold --core {agent.config.policy.core}, whose code it does "
            "not know: use --format onnx or pt2"
        )
    write, load = FORMATS[kind]
    step = ExportedStep(agent)
    contract = make_contract(agent, step)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"policy.{kind}"
    try:
        write(step, path, contract)
        run = load(path)
        difference = largest_difference(agent, step, run)
        if not difference <= TOLERANCE:
            raise UserError(
                f"the exported policy differs from the trained one by {difference:.2g}, more than "
                f"{TOLERANCE}: {path} is removed",
                exit_code=1,
            )
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    runtime = f"{RUNTIMES[kind]} {version(RUNTIMES[kind])}"
    contract |= {
        "file": path.name,
        "sha256": file_hash(path),
        "check": {
            "runtime": runtime,
            "max_difference": difference,
            "tolerance": TOLERANCE,
            "batches": BATCHES,
            "steps": NUM_STEPS,
        },
        "latency": latencies(agent, step, run),
    }
    (folder / CONTRACT).write_text(
        json.dumps(contract, indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )
    (folder / CARD).write_text(make_card(agent, contract, HOW_TO_RUN[kind]), encoding="utf-8")
    return path, contract


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(
        prog="python -m agents.export",
        description="Export a trained policy without noise, as one step with its state going in "
        "and out, with normaliser, reset and bounds of actions inside.",
        epilog=EPILOG,
    )
    parser.add_argument("path", metavar="RUN_DIR_OR_CHECKPOINT")
    formats = "onnx: ONNX Runtime and others; pt2: torch.export; safetensors: numpy alone"
    parser.add_argument("--format", choices=tuple(FORMATS), required=True, help=formats)
    folder = "folder for the files (default: RUN_DIR/export/FORMAT)"
    parser.add_argument("--output", metavar="DIR", help=folder)
    which = "checkpoint of a run directory (default: the best one where there is one)"
    parser.add_argument("--which", choices=("best", "last"), default="", help=which)
    core = "the run's own core, to import it though config.json is not yours"
    parser.add_argument("--core", metavar="MODULE:CLASS", help=core)
    return parser.parse_args()


@explains_errors
def main() -> int:
    """Entry of the command."""
    args = parse_args()
    agent = load_agent(args.path, which=args.which, core=args.core)
    print(f"{agent.path}, iteration {agent.iteration}{agent.chosen_by}")
    folder = Path(args.output or agent.run_dir / "export" / args.format)
    path, contract = export(agent, args.format, folder)
    check, latency = contract["check"], contract["latency"]
    print(
        f"{path}: {path.stat().st_size / 2**20:.2f} MiB; {check['runtime']} differs from torch by "
        f"at most {check['max_difference']:.1e} in {NUM_STEPS} steps of batches "
        f"{', '.join(map(str, BATCHES))} with resets\n"
        f"one step of one environment: {latency['exported']:.3f} ms, in torch "
        f"{latency['torch']:.3f} ms (one thread, {latency['cpu']})\n"
        f"beside it: {CONTRACT} for programs, {CARD} for people"
    )
    return 0
