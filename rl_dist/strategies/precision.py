"""Apply a precision: dtypes of parameters and matrix products, autocast, TF32.

Parameters, optimizer state, losses and statistics are fp64 with precision fp64, and fp32 with all
other precisions. Precisions bf16 and fp16 use torch's autocast. fp16 also needs a loss scale,
because gradients below 6e-8 would become zero.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Literal

import torch

# auto: the most precise of fp32, tf32 (only on GPUs) and bf16 that is about as fast as the fastest
Precision = Literal["auto", "fp32", "fp64", "tf32", "bf16", "fp16"]


def parameter_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the parameters, and of the network's computations outside autocast."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype of matrix products, or None if it is the dtype of the parameters."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def set_tf32(precision: str) -> None:
    """Allow TF32 rounding in fp32 matrix products only with precision tf32.

    By default, torch lets cuDNN use TF32, which affects LSTMs.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


@contextmanager
def autocast(dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Use `dtype` for matrix products inside the `with` block; None: change nothing.

    If oneDNN's LSTM does not work with this dtype on this CPU, torch's slower LSTM is used.
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
    """Cast each weight only once for all `autocast` blocks inside this context.

    The weights must not change inside the context. Torch keeps cast weights in a cache until the
    outermost autocast context ends. The context that this function returns is this outermost
    context; it casts nothing itself.
    """
    return nullcontext() if dtype is None else torch.autocast(device.type, enabled=False)


@lru_cache
def _onednn_has_lstm(dtype: torch.dtype) -> bool:
    """Return True if oneDNN's LSTM works with this dtype on this CPU.

    Torch calls oneDNN's LSTM on every CPU, although the call raises an error on some CPUs.
    """
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", dtype=dtype):
        try:
            torch.nn.LSTM(8, 8)(torch.zeros(2, 2, 8))[0].float().sum().backward()
        except RuntimeError:
            return False
    return True
