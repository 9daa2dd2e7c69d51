"""Functions that ranks run for the pipeline tests; spawned processes import them."""

import itertools
from dataclasses import replace

import torch
from agents_ranks import Recording, finish, make_job, parameters_of
from on_ranks import saves_results

from rl_dist.process_group.collectives import parameter_hash
from rl_dist.strategies.config import StrategyConfig

FORMS = {
    "ddp": StrategyConfig(mode="ddp"),
    "pipeline": StrategyConfig(mode="hybrid", hybrid_form="pipeline"),
}
CURVES = {
    "resets inside slots": ("trading, clstm", {}),
    "accumulation": ("recall, clstm", {"grad_accumulation": 2}),
    "feature window, strata of 2": ("recall, window, strata of 2", {}),
    "no memory": ("trading, no memory", {}),
    "KL stop": ("trading, KL stop", {}),
}
BRIEFLY = ("resets inside slots", "accumulation")
REST = [label for label in CURVES if label not in BRIEFLY]


def training_of(label, form, world, run_dir):
    name, options = CURVES[label]
    job = make_job(name, run_dir, iterations=2, checkpoint_every=1, **options)
    return Recording(replace(job, strategy=FORMS[form]), world)


def trained(training, resume_from=""):
    """Train to the end; return the parameters, losses and parameter hash."""
    finish(training, resume_from)
    return {
        "parameters": parameters_of(training),
        "losses": training.losses,
        "hash": parameter_hash(training.policy),
    }


def resumed(before, after, world, out_dir):
    """Resume a run of form `before` after its iteration 1, now in form `after`."""
    training = training_of(BRIEFLY[0], after, world, out_dir / f"{before}, then {after}")
    saved = out_dir / f"{BRIEFLY[0]}, {before}" / "checkpoints" / "iteration_00000001.pt"
    return trained(training, saved)["parameters"]


def poisoned(world, run_dir):
    """Train with an infinite loss in the first gradient step of rank 0."""
    training = training_of(BRIEFLY[0], "pipeline", world, run_dir)
    step, calls = training.ppo.step, itertools.count()

    def poison(minibatch, starts):
        if next(calls) == 0 and world.rank == 0:
            minibatch.advantages[0, 0] = torch.inf
        return step(minibatch, starts)

    training.ppo.step = poison
    return trained(training)


@saves_results
def exercise(world, out_dir, labels=BRIEFLY):
    """Train the cases `labels` of CURVES in each of the two forms.

    If the first case of CURVES is among them, also resume its pipeline run in both forms and its
    ddp run as a pipeline; then train this case with an infinite loss.
    """
    results = {
        (label, form): trained(training_of(label, form, world, out_dir / f"{label}, {form}"))
        for label in labels
        for form in FORMS
    }
    if BRIEFLY[0] in labels:
        for before, after in (("pipeline", "pipeline"), ("pipeline", "ddp"), ("ddp", "pipeline")):
            results["resumed", before, after] = resumed(before, after, world, out_dir)
        results["poisoned"] = poisoned(world, out_dir / "poisoned")
    return results
