"""What a precision means for parameters, products and gradients.

Parameters, optimizer, losses and statistics are fp32 (fp64 where asked for). bf16 and fp16 go through torch's autocast,
fp16 with a loss scale as well, because gradients below 6e-8 would vanish in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from rl_dist.errors import UserError

PRECISIONS = ("auto", "fp32", "fp64", "tf32", "bf16", "fp16")  # auto: fp32
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TENSOR_CORES = 8  # compute capability from which GPUs have TF32 and bf16


def parameter_dtype(precision: str) -> torch.dtype:
    """Type of parameters and of everything outside autocast."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Type of matrix products where it is another than that of the parameters."""
    return _AUTOCAST.get(precision)


def check_precision(precision: str, device_type: str) -> None:
    """Refuse a precision that the device does not have.

    Raises:
        UserError: tf32 on a CPU; tf32 or bf16 on a GPU that only emulates them.
    """
    if precision == "tf32" and device_type == "cpu":
        raise UserError("precision tf32 is a mode of NVIDIA GPUs and does nothing on a CPU: use fp32, or bf16")
    if precision in ("tf32", "bf16") and device_type == "cuda" and torch.version.cuda:
        major, minor = torch.cuda.get_device_capability()
        if major < _TENSOR_CORES:
            name = torch.cuda.get_device_name()
            raise UserError(f"precision {precision} needs compute capability 8.0, {name} has {major}.{minor}: use fp16")


def set_cuda_math(precision: str, cudnn_autotune: bool) -> None:
    """Set whether fp32 products are rounded to TF32, and cuDNN's autotuner.

    torch allows cuDNN, and so LSTMs, TF32 unless told otherwise; here fp32 means fp32.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = cudnn_autotune


@contextmanager
def autocast(dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Compute matrix products inside in `dtype`; None: nothing changes.

    On a CPU for which oneDNN has no LSTM of that type, torch's own takes its place: slow, but right.
    """
    if dtype is None:
        yield
        return
    native = device.type == "cpu" and torch.backends.mkldnn.is_available() and not _onednn_has_lstm(dtype)
    with torch.autocast(device.type, dtype=dtype):
        if not native:
            yield
            return
        enabled = torch.backends.mkldnn.set_flags(_enabled=False)[0]
        try:
            yield
        finally:
            torch.backends.mkldnn.set_flags(_enabled=enabled)


@lru_cache
def _onednn_has_lstm(dtype: torch.dtype) -> bool:
    """Tried out: torch asks oneDNN for such an LSTM whether the CPU has it or not."""
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", dtype=dtype):
        try:
            torch.nn.LSTM(8, 8)(torch.zeros(2, 2, 8))[0].float().sum().backward()
        except RuntimeError:
            return False
    return True


def loss_scaler(precision: str, device_type: str) -> torch.amp.GradScaler | None:
    """What scales losses so that fp16 gradients do not vanish, if needed."""
    return torch.amp.GradScaler(device_type) if precision == "fp16" else None
