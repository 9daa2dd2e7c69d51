"""Export a trained policy as an ONNX model, and check it in ONNX Runtime.

python -m agents.export RUN_DIR_OR_CHECKPOINT [--output DIR]
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

from agents.export.card import make_card
from agents.export.check import BATCHES, NUM_STEPS, TOLERANCE, largest_difference
from agents.export.contract import file_hash, make_contract
from agents.export.step import ExportedStep, run_onnx, write_onnx
from agents.run.saved import LoadedAgent, load_agent
from rl_dist.errors import CommandParser, UserError, explains_errors
from rl_dist.files import path_to_write

FOLDER, MODEL, CONTRACT, CARD = "export/onnx", "policy.onnx", "contract.json", "README.md"
PLAY = "play.py"
EPILOG = """examples:
  python -m agents.export runs/my_run
  python -m agents.export runs/my_run --which last --output my_policy
exit codes: 0 done, 1 the exported policy differs or cannot be made, 2 bad usage"""


def export(agent: LoadedAgent, folder: Path) -> tuple[Path, dict]:
    """Write a policy with its contract and its card, and check it in ONNX Runtime.

    Returns the model's path and the contract. A model that differs from the policy is removed, and
    refused.
    """
    step = ExportedStep(agent)
    contract = make_contract(agent, step)
    path, *others = (path_to_write(folder, name) for name in (MODEL, CONTRACT, CARD, PLAY))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_onnx(step, path, contract)
        difference = largest_difference(agent, step, run_onnx(path))
        if not difference <= TOLERANCE:
            raise UserError(
                f"the exported policy differs from the trained one by {difference:.2g}, more than "
                f"{TOLERANCE}: {path} is removed",
                exit_code=1,
            )
        contract |= {
            "file": MODEL,
            "sha256": file_hash(path),
            "check": {
                "runtime": f"onnxruntime {version('onnxruntime')}",
                "max_difference": difference,
                "tolerance": TOLERANCE,
                "batches": BATCHES,
                "steps": NUM_STEPS,
            },
        }
        card = make_card(agent, contract)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    play = Path(__file__).with_name(PLAY).read_text(encoding="utf-8")
    texts = json.dumps(contract, indent=2, allow_nan=False) + "\n", card, play
    for other, text in zip(others, texts, strict=True):
        other.write_text(text, encoding="utf-8")
    return path, contract


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(
        prog="python -m agents.export",
        description="Export a trained policy without noise as an ONNX model: one step with its "
        "state going in and out, with normaliser, reset and bounds of actions inside.",
        epilog=EPILOG,
    )
    parser.add_argument("path", metavar="RUN_DIR_OR_CHECKPOINT")
    folder = f"folder for the files (default: RUN_DIR/{FOLDER})"
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
    folder = Path(args.output or path_to_write(agent.run_dir, FOLDER))
    path, contract = export(agent, folder)
    check = contract["check"]
    print(
        f"{path}: {path.stat().st_size / 2**20:.2f} MiB; {check['runtime']} differs from torch by "
        f"at most {check['max_difference']:.1e} in {NUM_STEPS} steps of batches "
        f"{', '.join(map(str, BATCHES))} with resets\n"
        f"beside it: {CONTRACT} for programs, {CARD} for people, {PLAY} to play"
    )
    return 0
