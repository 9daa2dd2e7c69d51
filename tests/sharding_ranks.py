"""What the ranks of the sharding tests run; spawned processes must be able to import it."""

import copy
import time
from dataclasses import replace
from pathlib import Path

import torch
from agents_ranks import make_job
from faults_ranks import Keeping
from gymnasium.spaces import Box

from agents.policy import Policy, PolicyConfig
from agents.trainer import Training, train
from rl_dist.checkpoint.file import load_checkpoint
from rl_dist.errors import UserError
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.collectives import agree_max, check_in_sync
from rl_dist.process_group.hashes import parameter_hash
from rl_dist.process_group.world import StopFlag, close_world, open_world

NUM_SLOTS, LENGTH = 8, 4  # of all ranks together
MAX_GRAD_NORM = 0.05  # always clips
HALF = "iteration_00000001.pt"


def make_policy(seed=0):
    """A small cascade whose sizes no number of ranks divides; the critic's head has fewer rows than ranks."""
    torch.manual_seed(seed)
    return Policy(PolicyConfig(hidden_size=5), 3, Box(-1.0, 1.0, (3,))).double()


def batch(rank=0, size=1, number=0):
    """A rank's share of slots; episode starts fall so that ranks call their LSTMs differently often."""
    generator = torch.Generator().manual_seed(number)
    normal = {"dtype": torch.float64, "generator": generator}
    obs, actions = torch.randn(LENGTH, NUM_SLOTS, 3, **normal), torch.randn(LENGTH, NUM_SLOTS, 3, **normal)
    state = torch.randn(NUM_SLOTS, 6, 5, **normal)
    starts = torch.zeros(LENGTH, NUM_SLOTS, dtype=torch.bool)
    starts[1, 0] = starts[2, 1] = starts[3, 1] = starts[0, 2] = True
    count = NUM_SLOTS // size
    mine = slice(rank * count, (rank + 1) * count)
    return obs[:, mine], actions[:, mine], state[mine], starts[:, mine]


def loss_of(module, parts):
    evaluation = module(*parts)
    return (evaluation.values.square() - 0.1 * evaluation.logprobs + 0.01 * evaluation.entropy).mean()


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
            with strategy.accumulating(last=part == parts - 1):
                loss = loss_of(module, (obs[:, mine], actions[:, mine], state[mine], starts[:, mine]))
                strategy.backward(loss / parts)
        gradient = gradient or [whole(parameter.grad) for parameter in strategy.parameters]
        norm, stepped = strategy.step(optimizer, MAX_GRAD_NORM)
        assert stepped
        norms.append(norm)
    return {"norms": torch.stack(norms), "gradient": gradient}


def prepared(mode, world, seed=0, **options):
    """A strategy, its bare and its wrapped policy, and the optimizer."""
    strategy, policy = Strategy(StrategyConfig(mode=mode, **options), world), make_policy(seed)
    module = strategy.wrap(policy)
    return strategy, policy, module, torch.optim.Adam(strategy.parameters, lr=0.01)


def trained(mode, world, parts=1, **options):
    """Everything a mode brings back of three steps."""
    strategy, policy, module, optimizer = prepared(mode, world, seed=world.rank, **options)
    start = parameter_hash(policy)
    record = train_steps(strategy, module, optimizer, (world.rank, world.size), parts=parts)
    record |= {"start": start, "stats": strategy.stats(), "hash": parameter_hash(policy)}
    record |= {"module": strategy.module_state(), "optimizer": strategy.optimizer_state(optimizer)}
    record["parameters"] = [parameter.detach().clone() for parameter in policy.parameters()]
    return record, (strategy, policy, module, optimizer)


def probe(out_dir, shard_size=0):
    """Use mode hybrid beside ddp; the results go to rank_N.pt for the tests to judge."""
    world = open_world("cpu", timeout_s=60)
    ddp, _ = trained("ddp", world)
    hybrid, parts = trained("hybrid", world, shard_size=shard_size)
    results = {"ddp": ddp, "hybrid": hybrid} | act(parts[1]) | skip(world, *parts)
    results["in sync"] = in_sync(parts[1], world)
    results |= resume(world, hybrid, shard_size) | accumulate(world, shard_size)
    results |= {"refused": refusal(world), "refused optimizer": optimizer_refusal(world)}
    results["trainings"] = trainings(world, Path(out_dir), shard_size)
    results["other calls"] = other_calls(world, shard_size)  # the last: a reduction stays undone
    torch.save(results, Path(out_dir, f"rank_{world.rank}.pt"))
    close_world(world)


def act(policy):
    """Single steps and whole sequences of the bare policy, as collecting and judging do."""
    obs, _, state, starts = batch()
    lstm = policy.feature_core
    return {
        "acted": policy.act(obs[0], state, starts[0])[:3],
        "sequence": [output.detach() for output in policy.network(obs, state)[0]],
        "flat weights": [torch.equal(a, b) for a, b in zip(lstm._flat_weights, lstm.parameters(), strict=True)],
        "fresh state": policy.initial_state(2),
    }


def skip(world, strategy, policy, module, optimizer):
    """One rank's loss is not a number."""
    before = parameter_hash(policy)
    optimizer.zero_grad()
    with strategy.accumulating():
        loss = loss_of(module, batch(world.rank, world.size))
        strategy.backward(loss * (torch.nan if world.rank == 1 else 1.0))
    _, stepped = strategy.step(optimizer, MAX_GRAD_NORM)
    return {"skipped": not stepped and parameter_hash(policy) == before and strategy.skipped == 1}


def in_sync(policy, world):
    """What the sync check says: of healthy ranks, and of one that changed its copy."""
    check_in_sync(dict(policy.named_parameters()), world)
    try:
        with torch.no_grad():
            policy.critic_head.bias.add_(float(world.rank == 1))
        check_in_sync(dict(policy.named_parameters()), world)
    except UserError as error:
        return str(error)
    return ""


def resume(world, hybrid, shard_size):
    """Two more steps: going on, from whole states in hybrid, and from the same states in ddp."""
    place, results = (world.rank, world.size), {}
    for name, mode, options in (("again", "hybrid", {"shard_size": shard_size}), ("as ddp", "ddp", {})):
        strategy, policy, module, optimizer = prepared(mode, world, seed=99, **options)
        states = copy.deepcopy((hybrid["module"], optimizer, hybrid["optimizer"]))
        strategy.load(states[0], optimizer, states[2])
        train_steps(strategy, module, optimizer, place, count=2, first=3)
        results[name] = [parameter.detach().clone() for parameter in policy.parameters()]
    strategy, policy, module, optimizer = prepared("hybrid", world, shard_size=shard_size)
    train_steps(strategy, module, optimizer, place, count=5)
    results["uninterrupted"] = [parameter.detach().clone() for parameter in policy.parameters()]
    return results


def accumulate(world, shard_size):
    """Steps in parts, and how often gradients travelled."""
    told = world.gradients_ready
    calls = []
    world.gradients_ready = lambda: (calls.append(1), told())[1]
    record, _ = trained("hybrid", world, parts=2, shard_size=shard_size)
    world.gradients_ready = told
    return {"in parts": record, "reductions": len(calls)}


def other_calls(world, shard_size):
    """Rank 1 decides something while the others reduce gradients."""
    strategy, _, module, _ = prepared("hybrid", world, shard_size=shard_size)
    try:
        if world.rank == 1:
            agree_max(0, world)
        else:
            strategy.backward(loss_of(module, batch(world.rank, world.size)))
    except UserError as error:
        return str(error)
    return ""


def hang(out_dir):
    """Rank 1 does not come to the second reduction of gradients."""
    world = open_world("cpu", timeout_s=6)
    strategy, _, module, optimizer = prepared("hybrid", world)
    world.enter("update")
    train_steps(strategy, module, optimizer, (world.rank, world.size), count=1)
    time.sleep(1000.0 * world.rank)
    train_steps(strategy, module, optimizer, (world.rank, world.size), count=1)


def hang_before_forward(out_dir):
    """Rank 1 does not come to a forward pass whose parameters a backward pass without a step left sharded."""
    world = open_world("cpu", timeout_s=6)
    strategy, _, module, _ = prepared("hybrid", world)
    world.enter("update")
    with strategy.accumulating():
        strategy.backward(loss_of(module, batch(world.rank, world.size)))
    time.sleep(1000.0 * world.rank)
    module(*batch(world.rank, world.size))


def optimizer_refusal(world):
    """What is said of an optimizer that was made before sharding, of parameters that are no longer trained."""
    policy, strategy = make_policy(), Strategy(StrategyConfig(mode="hybrid"), world)
    early = torch.optim.Adam(policy.parameters(), lr=0.01)
    module = strategy.wrap(policy)
    with strategy.accumulating():
        strategy.backward(loss_of(module, batch(world.rank, world.size)))
    try:
        strategy.step(early, MAX_GRAD_NORM)
    except UserError as error:
        return str(error)
    return ""


def refusal(world):
    try:
        Strategy(StrategyConfig(mode="hybrid", shard_size=world.size + 1), world)
    except UserError as error:
        return str(error)
    return ""


def job(run_dir, mode="hybrid", **options):
    """A small training in a mode, with a checkpoint every iteration."""
    strategy = StrategyConfig(mode=mode, **options)
    return replace(make_job("recall, clstm", run_dir, iterations=2, checkpoint_every=1), strategy=strategy)


def run(job, world, resume_from=""):
    """Train, from a checkpoint if one is named; the end's parameters, with what training told."""
    training, writer = Training(job, world), Keeping()
    if resume_from:
        training.restore(load_checkpoint(resume_from))
    train(training, writer, StopFlag())
    kept = ("loss/policy", "loss/value", "optim/grad_norm", "episode/return")
    records = [{key: record[key] for key in kept} for record in writer.records]
    parameters = torch.cat([parameter.detach().flatten() for parameter in training.policy.parameters()])
    return {"parameters": parameters, "records": records, "hash": parameter_hash(training.policy)}


def trainings(world, out, shard_size):
    """Whole trainings: in hybrid, from its first iteration on in hybrid and ddp, and from ddp's in hybrid."""
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
