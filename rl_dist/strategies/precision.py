"""Precisions: types of parameters and of matrix products, autocast, TF32.

Parameters, optimizer, losses and statistics are fp32, or fp64 in precision fp64. bf16 and fp16 use
torch's autocast. fp16 also needs a loss scale, because gradients below 6e-8 would become zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Literal

import torch

from rl_dist.errors import UserError

# auto: fp32, unless the training has measured and chosen bf16
Precision = Literal["auto", "fp32", "fp64", "tf32", "bf16", "fp16"]


def parameter_dtype(precision: str) -> torch.dtype:
    """Return the type of parameters and of all numbers outside autocast."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the type of matrix products; None: that of the parameters."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def check_precision(precision: str, device_type: str) -> None:
    """Refuse a precision that the device does not support."""
    if precision == "tf32" and device_type == "cpu":
        raise UserError(
            "precision tf32 is a mode of NVIDIA GPUs and does nothing on a CPU: use fp32"
        )
    if precision in ("tf32", "bf16") and device_type == "cuda" and torch.version.cuda:
        major, minor = torch.cuda.get_device_capability()
        if major < 8:  # no tensor cores for TF32 and bf16
            raise UserError(
                f"precision {precision} needs compute capability 8.0, "
                f"{torch.cuda.get_device_name()} has {major}.{minor}: use fp16"
            )


def set_tf32(precision: str) -> None:
    """Round the products of fp32 numbers to TF32 in precision tf32 only.

    By default torch lets cuDNN round, and with it LSTMs.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


@contextmanager
def autocast(dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Compute matrix products inside in `dtype`; None changes nothing.

    If oneDNN has no LSTM of that type for this CPU, a slow one without oneDNN runs instead.
    """
    if dtype is None:
        yield
        return
    onednn = torch.backends.mkldnn
    avoids_onednn = device.type == "cpu" and onednn.is_available() and not _onednn_has_lstm(dtype)
    with torch.autocast(device.type, dtype=dtype):
        enabled = onednn.set_flags(_enabled=False)[0] if avoids_onednn else None
        try:
            yield
        finally:
            if avoids_onednn:
                onednn.set_flags(_enabled=enabled)


def weights_cast_once(
    dtype: torch.dtype | None, device: torch.device
) -> AbstractContextManager[object]:
    """Let all `autocast` inside share their casts of weights, which must not change.

    torch keeps casts until the outermost autocast ends. The one returned here only keeps them and
    casts nothing itself.
    """
    return nullcontext() if dtype is None else torch.autocast(device.type, enabled=False)


@lru_cache
def _onednn_has_lstm(dtype: torch.dtype) -> bool:
    """Return True if an LSTM of this type runs on this CPU.

    torch calls that of oneDNN on any CPU, and it may fail.
    """
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", dtype=dtype):
        try:
            torch.nn.LSTM(8, 8)(torch.zeros(2, 2, 8))[0].float().sum().backward()
        except RuntimeError:
            return False
    return True
