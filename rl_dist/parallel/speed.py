"""Options that make steps faster and change numbers by no more than rounding."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import nn

from rl_dist.config import flag
from rl_dist.errors import UserError

FUSED = ("auto", "on", "off")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """Faster ways to the same numbers, up to rounding."""

    fused_adam: str = flag("auto", "Adam's step as one kernel; auto: on GPUs", choices=FUSED)
    compile: bool = flag(
        False, "torch.compile for action distribution and loss, not for LSTMs, single layers and GAE; slow to start"
    )

    def __post_init__(self) -> None:
        if self.fused_adam not in FUSED:
            raise ValueError(f"fused_adam must be one of {', '.join(FUSED)}, got {self.fused_adam!r}")


def make_adam(parameters: Iterable[nn.Parameter], lr: float, device: torch.device, fused: str) -> torch.optim.Adam:
    """Adam, in one kernel or not."""
    one_kernel = fused == "on" or (fused == "auto" and device.type == "cuda")
    return torch.optim.Adam(parameters, lr=lr, eps=1e-5, fused=one_kernel)


def keep_options(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Saved state of an optimizer of one group, with this one's options.

    Such as its rate, its betas, and whether steps are fused.
    """
    own, saved = optimizer.param_groups[0], state["param_groups"][0]
    return state | {"param_groups": [own | {"params": saved["params"]}]}


def check_compiler(device_type: str) -> None:
    """Refuse where torch.compile lacks the compiler behind it.

    Raises:
        UserError: names what is missing.
    """
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    if not any(map(shutil.which, compilers)):
        raise UserError(f"compile needs a C++ compiler, found none of {', '.join(compilers)}: install g++, or set CXX")
    if device_type == "cuda" and find_spec("triton") is None:
        raise UserError("compile on a GPU needs the package triton, which comes with torch for CUDA: install it")


def compiled(function: F) -> F:
    """The same function through torch.compile, for any sizes.

    Sizes are variables from the first call on: kernels do not depend on what was called before, as a resumed run
    must not.
    """
    return torch.compile(function, dynamic=True)  # type: ignore[return-value]
