"""Functions for the ranks of the pipeline tests; they must be importable."""

import copy
import io
from dataclasses import replace
from pathlib import Path

import torch
from agents_ranks import make_job, parameters_of

from agents.ppo import PPOConfig
from agents.trainer import Training, train
from rl_dist.process_group.collectives import all_gather_json, parameter_hash
from rl_dist.process_group.world import StopFlag, close_world, open_world
from rl_dist.strategies.config import StrategyConfig
from rl_dist.telemetry.metrics import NullWriter

FORMS = {
    "ddp": StrategyConfig(mode="ddp"),
    "pipeline": StrategyConfig(mode="hybrid", hybrid_form="pipeline"),
}
CURVES = {
    "resets inside slots": ("trading, clstm", {}),
    "feature window, strata of 2": ("recall, window, strata of 2", {}),
    "no memory": ("trading, no memory", {}),
    "KL stop": ("trading, KL stop", {}),
    "fp32": ("cartpole, clstm, fp32", {}),
    "accumulation": ("recall, clstm", {"grad_accumulation": 2}),
}
BRIEFLY = ["resets inside slots", "accumulation"]
REST = [label for label in CURVES if label not in BRIEFLY]
UNCLIPPED = PPOConfig(max_grad_norm=1e6, update_epochs=1, norm_adv=False)


def training_of(name, form, world, run_dir="", **options):
    """A training of CASES with one of FORMS; one rank always trains alone."""
    job = make_job(name, run_dir, iterations=options.pop("iterations", 2), **options)
    return Training(
        replace(job, strategy=FORMS[form] if world.size > 1 else StrategyConfig()), world
    )


def trained(training):
    """Train to the end; what became of it."""
    losses: list[dict[str, float]] = []
    update = training.update

    def remember(rollout):
        losses.append(update(rollout))
        return losses[-1]

    training.update = remember
    train(training, NullWriter(), StopFlag())
    hashed = parameter_hash(training.policy)
    return {"parameters": parameters_of(training), "losses": losses, "hash": hashed}


def first_minibatch(training):
    """The first minibatch of a first rollout, as the update makes it."""
    found = []

    class EnoughError(Exception):
        pass

    def probe(minibatch, plans):
        found.append(minibatch)
        raise EnoughError

    training.warm_up_normalizers()
    training.ppo.step, step = probe, training.ppo.step
    try:
        training.update(training.collect(training.job.train.num_steps))
    except EnoughError:
        training.ppo.step = step
    return found[0]


def gradient_of(form, world):
    """The gradient of a first minibatch by parameter name, and its norm, on this rank."""
    training = training_of("trading, clstm", form, world, ppo=UNCLIPPED)
    _, norm, stepped = training.ppo.step(first_minibatch(training))
    named = training.policy.named_parameters()
    gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
    moments = sum(p in training.ppo.optimizer.state for p in training.policy.parameters())
    return {
        "gradients": gradients,
        "norm": float(norm),
        "stepped": bool(stepped),
        "moments": moments,
    }


def resumed_curves(world):
    """Parameters after 2 iterations: in one go, and resumed after the first in either form."""
    found = {"whole": trained(training_of("trading, clstm", "pipeline", world))["parameters"]}
    states = {}
    for form in FORMS:
        training = training_of("trading, clstm", form, world)
        stop_after(training, 1)
        states[form] = share(training.state(), world)
    for before, after in (("pipeline", "pipeline"), ("pipeline", "ddp"), ("ddp", "pipeline")):
        training = training_of("trading, clstm", after, world)
        training.restore(copy.deepcopy(states[before]))  # the optimizer works on what it is given
        found[before, after] = trained(training)["parameters"]
    return found


def stop_after(training, iterations):
    """Train until the end of an iteration, as after a signal."""
    flag = StopFlag()
    update = training.update

    def count(rollout):
        if training.iteration == iterations:
            flag.signum = 15
        return update(rollout)

    training.update = count
    train(training, NullWriter(), flag)


def share(state, world):
    """The main process's state on every rank."""
    buffer = io.BytesIO()
    torch.save(state if world.is_main_process else None, buffer)
    data = all_gather_json(buffer.getvalue().hex() if world.is_main_process else "", world)[0]
    return torch.load(io.BytesIO(bytes.fromhex(data)), weights_only=True)


def poisoned(world):
    """Take a step with a loss that is inf on one rank, and a step after it.

    Return whether this rank stepped, and the hashes of its parameters.
    """
    training = training_of("trading, clstm", "pipeline", world, ppo=UNCLIPPED)
    minibatch = first_minibatch(training)
    hashes, stepped = [parameter_hash(training.policy)], []
    for poison in (True, False):
        advantages = minibatch.advantages.clone()
        if poison and world.rank == 0:
            advantages[0, 0] = torch.inf
        stepped.append(bool(training.ppo.step(replace(minibatch, advantages=advantages))[2]))
        training.ppo.share_parameters()
        hashes.append(parameter_hash(training.policy))
    mesh = training.ppo.strategy.mesh
    backends = [group._get_backend(torch.device("cpu")) for group in mesh.get_all_groups()]
    timeouts_s = [each.options._timeout.total_seconds() for each in backends]
    return {"stepped": stepped, "hashes": hashes, "timeouts_s": timeouts_s}


def exercise(out_dir, labels, everything):
    """Train the curves of these labels; write all results to SIZE_rank_N.pt.

    With `everything`, also resume trainings and poison a gradient step.
    """
    world = open_world("cpu", timeout_s=60)
    results = {}
    for label in labels:
        name, options = CURVES[label]
        for form in FORMS:
            results[label, form] = trained(training_of(name, form, world, **options))
    results["gradient"] = gradient_of("pipeline", world)
    if everything:
        results["resumed"] = resumed_curves(world)
        results["poisoned"] = poisoned(world)
    torch.save(results, Path(out_dir, f"{world.size}_rank_{world.rank}.pt"))
    close_world(world)
    return 0
