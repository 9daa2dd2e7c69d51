"""Write an exported step as an ONNX model, and run it as a user would."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.export.step import INPUTS, OUTPUTS, ExportedStep
from rl_dist.errors import UserError, one_line

# obs [B, F], state [B, D], episode_start [B] -> actions [B, ...], state [B, D]
Runner = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
OPSET = 18
BATCH_AXIS = {name: {0: torch.export.Dim("batch")} for name in INPUTS}


def write_onnx(step: ExportedStep, path: Path, contract: dict[str, Any]) -> None:
    """Write an ONNX model whose metadata holds the contract."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(name)
        except ImportError:
            raise UserError(
                f"an export needs the package {name}: pip install 'clstm-ppo[export]'"
            ) from None
    with _quiet():
        model = torch.onnx.export(
            _traced(step),
            input_names=list(INPUTS),
            output_names=list(OUTPUTS),
            dynamic_shapes=BATCH_AXIS,  # for its name
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
        assert model is not None
        model.model.metadata_props["contract"] = json.dumps(contract)
        model.save(path, external_data=False)


def run_onnx(path: Path) -> Runner:
    """Load a model in ONNX Runtime, on one thread of the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda *inputs: tuple(session.run(OUTPUTS, dict(zip(INPUTS, inputs, strict=True))))


def _traced(step: ExportedStep) -> torch.export.ExportedProgram:
    """Trace the step for any number of environments; refuse one that cannot be."""
    rows = 3  # neither 0 nor 1, which torch takes for constants
    inputs = (
        torch.zeros(rows, step.policy.num_obs),
        torch.zeros(rows, step.state_size),
        torch.ones(rows, dtype=torch.bool),
    )
    try:
        with torch.no_grad():
            return torch.export.export(step, inputs, dynamic_shapes=BATCH_AXIS).run_decompositions()
    except Exception as error:  # of a tracer, or of foreign code: anything
        raise UserError(f"the policy cannot be traced: {one_line(error)}", exit_code=1) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters' remarks on their own progress off the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
