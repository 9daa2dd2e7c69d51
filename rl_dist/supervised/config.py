"""Settings and result of `fit`."""

from __future__ import annotations

from dataclasses import dataclass

from rl_dist.flags import Field, configuration


@configuration
class FitConfig:
    """Settings of `fit`: FitConfig(epochs=20, patience=3)."""

    epochs: int = Field(10, ge=1, le=10**6)
    """Passes over the training data, at most."""
    patience: int = Field(0, ge=0, le=10**6)
    """Stop after this many epochs in a row without a better validation loss; 0: never."""
    grad_accumulation: int = Field(1, ge=1, le=10**6)
    """Batches in one optimizer step, whose gradients add up: like a batch_size that is this many
    times larger, in less memory."""
    max_grad_norm: float = Field(1e6, ge=1e-6, le=1e30)
    """Scale the gradient of all ranks down to this norm."""
    max_bad_steps: int = Field(10, ge=0, le=10**9)
    """Skip this many steps in a row whose loss or gradient is NaN or inf, then stop."""
    seed: int = Field(1, ge=0, le=2**63 - 1)
    """Seed of the order of samples, and of random numbers in the module."""
    keep_checkpoints: int = Field(3, ge=1, le=10**6)
    """Newest checkpoints to keep."""
    progress: bool = True
    """Print a line for every epoch."""


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`."""

    history: list[dict[str, float]]  # one record per epoch with train/loss, valid/loss, ...
    # epoch with the lowest validation loss, or the last epoch without validation
    best_epoch: int
    signum: int = 0  # signal that stopped training early; 0: none
