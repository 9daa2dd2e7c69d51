"""What each rank and all ranks do, as a table for the start of a run."""

from __future__ import annotations

from agents.ppo import PPOConfig, learning_rate
from agents.sizes import Sizes, TrainConfig, in_ranks


def sizes_table(config: TrainConfig, sizes: Sizes, num_ranks: int, ppo: PPOConfig) -> str:
    """What one rank does and what all do together, as printed at the start."""
    steps = ppo.update_epochs * sizes.num_minibatches
    length, slot = config.num_steps, config.bptt_steps
    batch = "minibatch" if sizes.num_parts == 1 else f"{sizes.num_parts} minibatches"
    rows = [
        ("", "each rank", f"all {in_ranks(num_ranks)}"),
        ("environments", sizes.num_envs, sizes.global_num_envs),
        ("environment steps per iteration", sizes.num_envs * length, sizes.global_num_envs * length),
        (f"{batch}, slots of {slot} steps", sizes.batch_size, sizes.global_batch_size),
        (f"{batch}, environment steps", sizes.batch_size * slot, sizes.global_batch_size * slot),
        ("gradient steps per iteration", steps, f"{steps} (together)"),
    ]
    lines = [f"  {name:<34}{each!s:>12}{together!s:>16}" for name, each, together in rows]
    return "\n".join([*lines, f"  learning rate: {_describe_rate(config, sizes, ppo)}"])


def _describe_rate(config: TrainConfig, sizes: Sizes, ppo: PPOConfig) -> str:
    """The learning rate in words: scaled, rising, falling."""
    words = f"{ppo.learning_rate:g}"
    if config.lr_scaling != "none":
        growth = sizes.global_batch_size // config.slots_per_step
        peak = learning_rate(ppo, max(ppo.warmup, 1), 1.0, sizes.learning_rate_factor)
        words += f" x {sizes.learning_rate_factor:.4g} ({config.lr_scaling} of a {growth}-fold batch) = {peak:.4g}"
    if ppo.warmup:
        words += f", rising over the first {ppo.warmup} iterations"
    if ppo.anneal_lr:
        budget = f"{config.total_steps} steps" if config.total_steps else f"{config.num_episodes} episodes"
        words += f", falling to 0 over {budget}"
    return words
