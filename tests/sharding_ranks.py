"""Functions for the ranks of the sharding tests; they must be importable."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from agents_ranks import make_job
from faults_ranks import Keeping
from gymnasium.spaces import Box

from agents.config import RunConfig
from agents.evaluate.final import evaluate_last_and_best
from agents.policy import Policy, PolicyConfig
from agents.trainer import Training, train
from envs.task import GymTask, TaskConfig
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.errors import UserError
from rl_dist.process_group.collectives import all_reduce_max, parameter_hash
from rl_dist.process_group.world import StopFlag, close_world, open_world
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy

NUM_SLOTS, LENGTH = 8, 4  # of all ranks together
MAX_GRAD_NORM = 0.05  # always clips
HALF = "iteration_00000001.pt"


def make_policy(seed=0):
    """A small cascade whose sizes no number of ranks divides; its critic has one row."""
    torch.manual_seed(seed)
    return Policy(PolicyConfig(hidden_size=5), 3, Box(-1.0, 1.0, (3,))).double()


def batch(rank=0, size=1, number=0):
    """A rank's share of slots, cut so that ranks call their LSTMs differently often."""
    generator = torch.Generator().manual_seed(number)
    normal = {"dtype": torch.float64, "generator": generator}
    obs = torch.randn(LENGTH, NUM_SLOTS, 3, **normal)
    actions = torch.randn(LENGTH, NUM_SLOTS, 3, **normal)
    state = torch.randn(NUM_SLOTS, 6, 5, **normal)
    starts = torch.zeros(LENGTH, NUM_SLOTS, dtype=torch.bool)
    starts[1, 0] = starts[2, 1] = starts[3, 1] = starts[0, 2] = True
    count = NUM_SLOTS // size
    mine = slice(rank * count, (rank + 1) * count)
    return obs[:, mine], actions[:, mine], state[mine], starts[:, mine]


def loss_of(module, parts):
    found = module(*parts)
    return (found.values.square() - 0.1 * found.logprobs + 0.01 * found.entropy).mean()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def train_steps(strategy, module, optimizer, place, count=3, first=0, parts=1):
    """Clipped gradient steps; the norms and the whole gradient of the first."""
    norms, gradient = [], []
    for number in range(first, first + count):
        optimizer.zero_grad()
        obs, actions, state, starts = batch(*place, number)
        for part in range(parts):
            mine = slice(part * obs.shape[1] // parts, (part + 1) * obs.shape[1] // parts)
            inputs = obs[:, mine], actions[:, mine], state[mine], starts[:, mine]
            with strategy.accumulating(last=part == parts - 1):
                strategy.backward(loss_of(module, inputs) / parts)
        gradient = gradient or [whole(parameter.grad) for parameter in strategy.parameters]
        norm, stepped = strategy.step(optimizer, MAX_GRAD_NORM)
        assert stepped
        norms.append(norm)
    return {"norms": torch.stack(norms), "gradient": gradient}


def prepared(mode, world, seed=0, **options):
    """A strategy, its bare and its wrapped policy, and the optimizer."""
    strategy = Strategy(StrategyConfig(mode=mode, **options), world)
    policy = make_policy(seed)
    module = strategy.wrap(policy)
    return strategy, policy, module, torch.optim.Adam(strategy.parameters, lr=0.01)


def trained(mode, world, parts=1, **options):
    """Everything a mode brings back of three steps."""
    strategy, policy, module, optimizer = prepared(mode, world, seed=world.rank, **options)
    start = parameter_hash(policy)
    record = train_steps(strategy, module, optimizer, (world.rank, world.size), parts=parts)
    record |= {"start": start, "hash": parameter_hash(policy)}
    if strategy.shards:
        shards = [parameter.to_local() for parameter in strategy.parameters]
        size = sum(shard.numel() * shard.element_size() for shard in shards)
        mesh = strategy.shards.mesh
        backends = [group._get_backend(torch.device("cpu")) for group in mesh.get_all_groups()]
        record |= {"mesh": list(mesh.shape), "shard_bytes": size}
        record["timeouts_s"] = [each.options._timeout.total_seconds() for each in backends]
    record |= {"module": strategy.module_state(), "optimizer": strategy.optimizer_state(optimizer)}
    record["parameters"] = [parameter.detach().clone() for parameter in policy.parameters()]
    return record, (strategy, policy, module, optimizer)


def probe(out_dir, shard_size=0):
    """Use mode hybrid beside ddp; the results go to rank_N.pt."""
    world = open_world("cpu", timeout_s=60)
    ddp, _ = trained("ddp", world)
    trained("hybrid", world, shard_size=shard_size)[1][0].close()  # as strategy auto tries it
    hybrid, parts = trained("hybrid", world, shard_size=shard_size)
    results = {"ddp": ddp, "hybrid": hybrid} | skip(world, *parts)
    results |= accumulate(world, shard_size)
    results["refused optimizer"] = optimizer_refusal(world)
    results["trainings"] = trainings(world, Path(out_dir), shard_size)
    results["other calls"] = other_calls(world, shard_size)  # the last: a reduction stays undone
    torch.save(results, Path(out_dir, f"rank_{world.rank}.pt"))
    close_world(world)


def skip(world, strategy, policy, module, optimizer):
    """One rank's loss is not a number."""
    before = parameter_hash(policy)
    optimizer.zero_grad()
    with strategy.accumulating():
        loss = loss_of(module, batch(world.rank, world.size))
        strategy.backward(loss * (torch.nan if world.rank == 1 else 1.0))
    _, stepped = strategy.step(optimizer, MAX_GRAD_NORM)
    return {
        "skipped": not bool(stepped) and parameter_hash(policy) == before and strategy.skipped == 1
    }


def accumulate(world, shard_size):
    """Steps in parts, and how often gradients travelled."""
    with mock.patch.object(world, "gradients_ready", wraps=world.gradients_ready) as calls:
        record, _ = trained("hybrid", world, parts=2, shard_size=shard_size)
    return {"in parts": record, "reductions": calls.call_count}


def other_calls(world, shard_size):
    """Rank 1 decides something while the others reduce gradients."""
    strategy, _, module, _ = prepared("hybrid", world, shard_size=shard_size)
    try:
        if world.rank == 1:
            all_reduce_max(0, world)
        else:
            strategy.backward(loss_of(module, batch(world.rank, world.size)))
    except UserError as error:
        return str(error)
    return ""


def optimizer_refusal(world):
    """The refusal of an optimizer made before sharding, of parameters no longer trained."""
    policy = make_policy()
    strategy = Strategy(StrategyConfig(mode="hybrid"), world)
    early = torch.optim.Adam(policy.parameters(), lr=0.01)
    module = strategy.wrap(policy)
    with strategy.accumulating():
        strategy.backward(loss_of(module, batch(world.rank, world.size)))
    try:
        strategy.step(early, MAX_GRAD_NORM)
    except UserError as error:
        return str(error)
    return ""


def job(run_dir, mode="hybrid", **options):
    """A small training in a mode, with a checkpoint every iteration."""
    strategy = StrategyConfig(mode=mode, **options)
    return replace(
        make_job("recall, clstm", run_dir, iterations=2, checkpoint_every=1), strategy=strategy
    )


def run(job, world, resume_from=""):
    """Train, from a checkpoint if one is named; the end's parameters, with its records."""
    training, writer = Training(job, world), Keeping()
    if resume_from:
        training.restore(load_checkpoint(resume_from))
    train(training, writer, StopFlag())
    kept = ("loss/policy", "loss/value", "optim/grad_norm", "episode/return")
    records = [{key: record[key] for key in kept} for record in writer.records]
    parameters = torch.cat(
        [parameter.detach().flatten() for parameter in training.policy.parameters()]
    )
    task = TaskConfig(env="Recall-v0", eval_episodes=4)
    figures, _ = evaluate_last_and_best(
        RunConfig(task=task), GymTask(task), training, Path(job.run_dir)
    )
    return {
        "parameters": parameters,
        "records": records,
        "hash": parameter_hash(training.policy),
        "evaluated": figures["test"],
    }


def trainings(world, out, shard_size):
    """Whole trainings: hybrid, resumed in hybrid and in ddp, and one of ddp resumed in hybrid."""
    half = f"checkpoints/{HALF}"

    def hybrid(name, resume_from=""):
        return run(job(out / name, shard_size=shard_size), world, resume_from)

    return {
        "hybrid": hybrid("hybrid"),
        "ddp": run(job(out / "ddp", "ddp"), world),
        "hybrid, resumed": hybrid("again", out / "hybrid" / half),
        "hybrid, resumed as ddp": run(job(out / "as_ddp", "ddp"), world, out / "hybrid" / half),
        "ddp, resumed as hybrid": hybrid("as_hybrid", out / "ddp" / half),
    }
