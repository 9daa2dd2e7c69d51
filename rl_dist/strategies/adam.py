"""Adam without torch.compile, and steps that a flag on the device allows."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class EagerAdam(torch.optim.Adam):
    """Adam that does not load torch.compile, which takes as long as loading torch.

    Torch wraps these methods so that they are never compiled, and the wrappers load the compiler.
    The numbers are the same.
    """

    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Adam.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


def step_if(finite: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step if the flag [] is True; torch's fused optimizers read it on the GPU."""
    fused: Any = optimizer
    if finite.device.type == "cuda" and getattr(fused, "_step_supports_amp_scaling", False):
        # torch.amp.GradScaler does the same
        fused.grad_scale, fused.found_inf = None, (~finite).float()
        fused.step()
        del fused.grad_scale, fused.found_inf
    elif finite:
        optimizer.step()


def make_adam(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Adam:
    """Return an Adam that steps all parameters in one kernel."""
    return EagerAdam(parameters, lr=lr, eps=1e-5, fused=True)


def keep_options(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state with the options of `optimizer`, such as its `eps`."""
    saved = state["param_groups"][0]
    options = optimizer.param_groups[0]
    return state | {"param_groups": [options | {"params": saved["params"]}]}
