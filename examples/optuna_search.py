"""Search for good settings with Optuna, which stops unpromising runs early.

    pip install 'clstm-ppo[optuna]'
    python -m examples.optuna_search

Every validation result is reported to the Optuna trial. If the result is worse than the median
result of other trials at the same step, the callback returns False and the training stops. Several
copies of this script, on one machine or many, share one search if they use the same storage. Check
the best settings again with other seeds: the best result of many trials is partly luck.
"""

from functools import partial

import optuna

from agents import train
from rl_dist.errors import UserError


def objective(trial, total_steps, **fixed):
    """Train with a trial's settings; return the mean test return (no action noise)."""

    def report(moment):  # if it returns False, the training stops
        trial.report(moment.metrics["valid/return"], moment.metrics["global_step"])
        return not trial.should_prune()

    run = train(
        "CartPole-v1",
        total_steps=total_steps,
        learning_rate=trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        ent_coef=trial.suggest_float("ent_coef", 1e-4, 3e-2, log=True),
        gae_lambda=trial.suggest_categorical("gae_lambda", [0.9, 0.95, 0.98]),
        on_evaluation=report,
        **{"validate_every": 4, "eval_episodes": 20, "threads": 1, **fixed},
    )
    if run.metrics[-1]["global_step"] < total_steps:
        raise optuna.TrialPruned
    return run.test["return"]


def main():
    """Run 20 trials; if the storage already contains this search, continue it."""
    study = optuna.create_study(
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
        storage="sqlite:///search.db",
        load_if_exists=True,
        study_name="cartpole",
    )
    study.optimize(partial(objective, total_steps=20_000), n_trials=20, catch=[UserError])
    return study


if __name__ == "__main__":
    best = main().best_trial
    print(f"best of all trials: return {best.value:.1f} with {best.params}")
