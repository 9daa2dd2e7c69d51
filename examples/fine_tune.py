"""Fine-tune a policy: train on an easy task, then on a harder task.

    python -m examples.fine_tune

Recall-v0 shows a cue and asks for it after `delay` more observations. The first run trains on the
easy task. The second run trains on the harder task. It starts from the weights and normalisers of
the first run, but with a new optimizer, new counters and new environments. The third run trains on
the harder task from scratch, for comparison. These commands do the same as the first two runs:

    python train_distributed.py --env Recall-v0 --env_kwargs '{"delay": 2}' --run_dir runs/easy
    python train_distributed.py --env Recall-v0 --env_kwargs '{"delay": 20}' --init_from runs/easy

Observations and actions must have the same shapes in both tasks. With seed 1, the second run
reaches a return of 1.00 and the third run 0.63, after 16,384 steps each (measured on 2026-11-23).
"""

from functools import partial

from agents import train


def main(total_steps=16_000):
    """Train three times; return the mean test return of each run (no action noise)."""
    recall = partial(train, "Recall-v0", total_steps=total_steps, validate_every=0, threads=1)
    easy = recall(env_kwargs={"delay": 2})
    tuned = recall(env_kwargs={"delay": 20}, init_from=easy.run_dir)
    fresh = recall(env_kwargs={"delay": 20})
    runs = {"easy task": easy, "hard task, fine-tuned": tuned, "hard task, from scratch": fresh}
    return {name: run.test["return"] for name, run in runs.items()}


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name}: return {value:.2f} (the maximum is 1, chance gives 0.25)")
