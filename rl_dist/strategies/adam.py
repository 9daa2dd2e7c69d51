"""Run Adam without loading torch.compile, and skip steps without waiting for the GPU."""

import inspect
from typing import Any

import torch
from torch import Tensor


class EagerAdam(torch.optim.Adam):
    """Adam that does not load torch.compile, to start faster.

    Loading torch.compile takes as long as loading torch itself. In torch's Adam, the methods below
    have wrappers that exclude them from compilation. These wrappers load the compiler. Without the
    wrappers, the results are the same.
    """

    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Adam.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


def step_if(finite: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer if the scalar tensor `finite` is True.

    Torch's fused optimizers read `finite` on the GPU, so the CPU does not wait for the GPU.
    """
    fused: Any = optimizer
    if finite.device.type == "cuda" and getattr(fused, "_step_supports_amp_scaling", False):
        # torch.amp.GradScaler passes its flag in the same way
        fused.grad_scale = None
        fused.found_inf = (~finite).float()
        fused.step()
        del fused.grad_scale, fused.found_inf
    elif finite:
        optimizer.step()


def keep_options(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the saved `state` of an optimizer, but with the current options of `optimizer`.

    Options are, for example, the learning rate and `eps`.
    """
    saved = state["param_groups"][0]
    return state | {"param_groups": [optimizer.param_groups[0] | {"params": saved["params"]}]}
