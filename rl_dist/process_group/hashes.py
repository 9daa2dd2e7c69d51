"""Hashes of tensors: whether ranks, and runs, hold the same."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def parameter_hash(module: nn.Module) -> str:
    """SHA-256 over the bytes of all parameters in order, wrapped or not."""
    return tensor_hash(*module.parameters())


def tensor_hash(*tensors: torch.Tensor) -> str:
    """SHA-256 over the bytes of tensors, one after the other."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_raw(tensor))
    return digest.hexdigest()


def _raw(tensor: torch.Tensor) -> memoryview:
    copied = tensor.detach().to("cpu", copy=True)  # numpy pins storage for good, and whole parameters are freed
    return copied.contiguous().reshape(-1).view(torch.uint8).numpy().data
