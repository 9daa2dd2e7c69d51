"""The GPUs that a job uses, of those that torch sees: --gpu_ids."""

from __future__ import annotations

import os

from rl_dist.errors import UserError


def parse_gpu_ids(text: str) -> tuple[int, ...]:
    """Read ids out of "0,2,3"; none out of ""."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() for word in words):
        raise UserError(
            f"gpu_ids must be whole numbers with commas between, such as 0,2,3, got {text!r}"
        )
    ids = tuple(int(word) for word in words)
    twice = sorted({number for number in ids if ids.count(number) > 1})
    if twice:
        raise UserError(f"gpu_ids has {twice[0]} more than once in {text!r}: name each GPU once")
    return ids


def check_gpu_ids(ids: tuple[int, ...], num_gpus: int, visible: int) -> None:
    """Compare ids with the GPUs that torch sees and with the number asked for."""
    unknown = [number for number in ids if number >= visible]
    if unknown:
        limit = os.environ.get("CUDA_VISIBLE_DEVICES")
        counted = f" in CUDA_VISIBLE_DEVICES={limit}, whose entries are counted from 0"
        there = f"0..{visible - 1}" if visible else "no CUDA GPU"
        raise UserError(
            f"gpu_ids has {unknown[0]}, but torch sees {there}{counted if limit else ''}"
        )
    if ids and num_gpus not in (-1, len(ids)):
        raise UserError(
            f"gpu_ids names {len(ids)} GPU(s), but num_gpus is {num_gpus}: leave num_gpus out"
        )
