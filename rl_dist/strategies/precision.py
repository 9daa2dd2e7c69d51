"""Apply a precision: types of parameters and matrix products, copies with cast weights, TF32.

Parameters, optimizer state, losses and statistics are fp64 with precision fp64, and fp32 with all
other precisions. With bf16 and fp16, matrix products use copies of the weights that are cast once
per gradient step (`cast_copy`). fp16 also needs a loss scale, because gradients below 6e-8 would
become zero.
"""

from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)

# auto: the most precise of fp32, tf32 (only on GPUs) and bf16 that is about as fast as the fastest
Precision = Literal["auto", "fp32", "fp64", "tf32", "bf16", "fp16"]


def parameter_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the parameters, and of all that is not in `low_precision`."""
    return torch.float64 if precision == "fp64" else torch.float32


def low_precision(precision: str) -> torch.dtype | None:
    """Return the dtype of matrix products, or None if it is the dtype of the parameters."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def set_tf32(precision: str) -> None:
    """Allow TF32 rounding in fp32 matrix products only with precision tf32.

    By default, torch lets cuDNN use TF32, which affects LSTMs.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def cast_copy(module: Module, dtype: torch.dtype | None) -> Module:
    """Return a copy of a module and its children with weights of type `dtype`; None: the module.

    Gradients flow to the parameters of the module. The weights must not change while the copy is in
    use. Torch's autocast is not used, because it would let LSTMs on GPUs compute in fp16 instead of
    bf16, and LSTMs on some CPUs raise an error.
    """
    if dtype is None:
        return module
    # replicas of DataParallel hold their weights as plain attributes
    attributes = {**vars(module), **dict(module.named_parameters(recurse=False))}
    changes = {n: value.to(dtype) for n, value in attributes.items() if isinstance(value, Tensor)}
    children = {name: cast_copy(child, dtype) for name, child in module.named_children()}
    return changed_copy(module, {**changes, "_modules": children})


def changed_copy(module: Module, changes: dict[str, Any]) -> Module:
    """Return a shallow copy of a module with other values of some attributes.

    The copy can be used, but it cannot be trained: it lists the parameters of the module.
    """
    copy = object.__new__(type(module))
    # an attribute in this dict hides a parameter or child of the same name
    copy.__dict__ = vars(module) | changes
    return copy
