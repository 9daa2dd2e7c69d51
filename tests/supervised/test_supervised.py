"""Supervised training: the same on any number of ranks, resumed as if never stopped."""

import itertools
import math
import re
import signal

import pytest
import torch
from supervised_ranks import (
    CRITERION,
    METRICS,
    Fitted,
    Raising,
    blobs,
    exercise,
    leave_on_one_rank,
    make_net,
)
from tensorboard_readers import seen
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.errors import UserError
from rl_dist.launch.ranks import launch
from rl_dist.process_group.world import World, close_world, open_world, stop_flag
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.loaders import evaluation_batches, shared_loader
from rl_dist.strategies.strategy import Strategy
from rl_dist.supervised.fit import BatchError, FitConfig, evaluate, fit


@pytest.fixture
def world():
    opened = open_world("cpu")
    yield opened
    close_world(opened)


def world_of(rank, size):
    return World(rank=rank, local_rank=rank, size=size, device=torch.device("cpu"), backend="gloo")


def numbered(count):
    return TensorDataset(torch.arange(count), torch.arange(count))


def equal(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def wrapped(world):
    strategy = Strategy(StrategyConfig(), world)
    module = strategy.wrap(make_net())
    return module, torch.optim.SGD(strategy.parameters, lr=0.1), CRITERION, strategy


# ---- loaders


@pytest.mark.parametrize("num_samples", [7, 8, 23, 101])
def test_evaluation_gives_every_sample_to_one_rank_in_equally_many_batches(num_samples):
    for batch_size, size in itertools.product([1, 4, 12, 1000], [1, 2, 3, 7]):
        shares = [evaluation_batches(num_samples, batch_size, rank, size) for rank in range(size)]
        batches = [batch for share in shares for batch in share]
        assert sorted(itertools.chain(*batches)) == list(range(num_samples))
        assert len({len(share) for share in shares}) == 1
        assert (
            min(map(len, batches)) >= 1 and max(map(len, batches)) <= max(1, batch_size // size) + 1
        )


def batches_of_all_ranks(loader, size, epoch):
    """What the ranks see together in every batch of an epoch."""
    shares = [
        shared_loader(loader, world_of(rank, size), training=True, seed=5) for rank in range(size)
    ]
    for share in shares:
        share.set_epoch(epoch)
    parts = [[batch[0].tolist() for batch in share] for share in shares]
    return [sorted(sum(together, [])) for together in zip(*parts, strict=True)]


def test_a_training_batch_holds_the_same_samples_on_any_number_of_ranks():
    loader = DataLoader(numbered(101), batch_size=12, shuffle=True)
    first, second = (batches_of_all_ranks(loader, 1, epoch) for epoch in (1, 2))
    assert len(first) == 101 // 12 and all(len(batch) == 12 for batch in first)
    assert first != second and first != [sorted(range(12 * k, 12 * k + 12)) for k in range(8)]
    for size in (2, 3, 4):
        assert batches_of_all_ranks(loader, size, 1) == first
        assert batches_of_all_ranks(loader, size, 2) == second


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


SAMPLES = numbered(8)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(Stream(), batch_size=2), "length"),
        (DataLoader(SAMPLES, 2, sampler=WeightedRandomSampler([1.0] * 8, 8)), "WeightedRandom"),
        (DataLoader(SAMPLES, 2, sampler=RandomSampler(SAMPLES, replacement=True)), "RandomSampler"),
        (DataLoader(SAMPLES, batch_sampler=[[0, 1], [2, 3]]), "batch_sampler"),
        (DataLoader(SAMPLES, batch_size=3), "batch_size 3.* over 2 ranks: try 2 or 4"),
        (DataLoader(SAMPLES, batch_size=10), "more than the 8 samples"),
        ([SAMPLES], "torch DataLoader, got a list"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_name(loader, words):
    with pytest.raises(UserError, match=words):
        shared_loader(loader, world_of(0, 2), training=True)


# ---- several ranks


@pytest.fixture(scope="module")
def ranks(ranks_folder, tmp_path_factory):
    """What two ranks found, and the same on one."""
    two = [torch.load(ranks_folder / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]
    alone = tmp_path_factory.mktemp("one")
    exercise(str(alone))
    return two, torch.load(alone / "rank_0.pt", weights_only=True)


def test_two_ranks_fit_as_one_does(ranks):
    two, one = ranks
    assert two[0]["hash"] == two[1]["hash"]
    torch.testing.assert_close(two[0]["weights"], one["weights"], rtol=0, atol=1e-12)
    for record, alone in zip(two[1]["history"], one["history"], strict=True):
        assert record == pytest.approx(alone, abs=1e-12)
    assert one["history"][-1]["train/loss"] < one["history"][0]["train/loss"]


def test_accuracy_counts_every_sample_once_on_any_number_of_ranks(ranks):
    two, one = ranks
    assert one["test"]["samples"] == 41 and two[0]["test"] == two[1]["test"]
    assert two[0]["test"]["samples"] == 41 and two[0]["test"]["accuracy"] == one["test"]["accuracy"]
    assert (41 * one["test"]["accuracy"]) == pytest.approx(round(41 * one["test"]["accuracy"]))


def test_two_resumed_ranks_end_bit_for_bit_as_uninterrupted_ones(ranks):
    for found in (*ranks[0], ranks[1]):
        assert equal(found["whole"]["weights"], found["resumed"]["weights"])
        assert found["whole"]["history"] == found["resumed"]["history"]


def test_sharded_ranks_and_workers_fit_as_others_do_and_checkpoints_pass_between_strategies(ranks):
    for found in (*ranks[0], ranks[1]):
        for kind in ("across", "sharded"):
            torch.testing.assert_close(found[kind], ranks[1]["weights"], rtol=0, atol=1e-12)
        assert equal(found["loaded"], found["weights"])


def test_a_loss_that_is_nan_on_one_rank_once_costs_that_step_on_all(ranks):
    two, one = ranks
    for found in (*two, one):
        assert found["skipped"] == 1
        train = [record["train/loss"] for record in found["bad_history"]]
        assert math.isnan(train[0]) and train[2] < train[1] < 1.1
    assert all(value.isfinite().all() for value in one["bad"].values())
    torch.testing.assert_close(two[0]["bad"], one["bad"], rtol=0, atol=1e-12)


def test_running_statistics_are_means_over_ranks_and_other_buffers_those_of_rank_0(ranks):
    (left, right), _ = ranks
    assert equal(left["batch_norm"], right["batch_norm"])
    for name in ("seen", "net.1.running_mean"):
        assert left["batch_norm"][name].abs().sum() > 0


def test_a_sample_that_cannot_be_loaded_is_told_by_the_rank_that_has_it(ranks):
    found = [rank["raised"].partition(": ") for rank in (*ranks[0], ranks[1])]
    places = ["evaluation, batch 5, rank 0", "evaluation, batch 5, rank 1"]
    assert [place for place, _, _ in found] == [*places, "evaluation, batch 2, rank 0"]
    assert found[1][2] == "OSError: image 40 is torn"


def test_a_rank_that_leaves_after_its_error_does_not_keep_the_others_waiting(tmp_path, capfd):
    assert launch(leave_on_one_rank, (str(tmp_path),), 2) == 1
    # who is first: the watchdog, or gloo, whose connection is closed
    words = "for rank 1, which has left after collective|rank 0: the connection broke"
    assert re.search(words, capfd.readouterr().err)


# ---- one rank


def test_accumulated_batches_equal_one_larger_batch(world):
    found = []
    for batch_size, parts in ((16, 1), (8, 2), (4, 4)):
        module, optimizer, criterion, strategy = wrapped(world)
        steps = []
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        config = FitConfig(epochs=2, grad_accumulation=parts, progress=False)
        loader = DataLoader(blobs(48), batch_size=batch_size)
        fit(module, loader, optimizer, criterion, strategy, config=config)
        found.append([p.detach() for p in module.parameters()])
        assert len(steps) == 6
    torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=0, atol=1e-12)


def test_fitting_stops_when_validation_gets_no_better_and_keeps_the_best(world, tmp_path):
    data = {"validation": DataLoader(blobs(31, 1, flipped=True), batch_size=12)}
    config = {"patience": 2, "epochs": 20}
    fitted = Fitted(world, tmp_path, config=config, **data)
    losses = [record["valid/loss"] for record in fitted.result.history]
    best = fitted.result.best_epoch
    assert len(losses) == best + 2 < 20 and losses[best - 1] == min(losses)
    assert equal(fitted.weights, load_checkpoint(tmp_path / "checkpoints" / "best.pt")["module"])
    again = evaluate(fitted.module, data["validation"], CRITERION, fitted.strategy, METRICS)
    assert again["loss"] == losses[best - 1]
    resumed = Fitted(world, tmp_path, config=config, resume=True, **data)
    assert equal(resumed.weights, fitted.weights)
    assert resumed.result.history == fitted.result.history


def test_tensorboard_has_every_epoch_once_whatever_was_lost_before_it_went_on(world, tmp_path):
    Fitted(world, tmp_path, epochs=2)
    (ours,) = tmp_path.glob("events.out.tfevents.*")
    ours.write_bytes(ours.read_bytes()[:-20])  # torn
    other = tmp_path / "events.out.tfevents.1.of_somebody_else"
    other.write_bytes(b"")
    history = Fitted(world, tmp_path, epochs=4, resume=True).result.history
    for tag in ("train/loss", "train/accuracy", "valid/loss", "valid/accuracy"):
        assert seen(tmp_path, tag) == [
            (k, pytest.approx(one[tag])) for k, one in enumerate(history, 1)
        ]
    assert len(history) == 4 and other.exists() and len(list(tmp_path.glob("events.*"))) == 2


def test_a_stop_signal_ends_an_epoch_early_and_resuming_repeats_it(world, tmp_path, monkeypatch):
    whole = Fitted(world, tmp_path / "whole", batch_size=2)
    steps = []

    def counting(outputs, targets):
        steps.append(1)
        if len(steps) == 60:  # in the second epoch: an epoch has 33 batches, validation 16
            stop_flag.signum = signal.SIGTERM
        return METRICS["accuracy"](outputs, targets)

    monkeypatch.setattr(stop_flag, "signum", 0)
    stopped = Fitted(world, tmp_path / "parts", batch_size=2, metrics={"accuracy": counting})
    assert stopped.result.signum == signal.SIGTERM and len(stopped.result.history) == 1
    monkeypatch.setattr(stop_flag, "signum", 0)
    resumed = Fitted(world, tmp_path / "parts", batch_size=2, resume=True)
    assert equal(resumed.weights, whole.weights) and resumed.result.history == whole.result.history


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_raises_ends_training_with_its_place(world, workers):
    loader = DataLoader(Raising(48, 17), batch_size=8, num_workers=workers)
    module, optimizer, criterion, strategy = wrapped(world)
    with pytest.raises(BatchError, match="epoch 1, batch 2, rank 0: OSError: .*image 17 is torn"):
        fit(module, loader, optimizer, criterion, strategy, config=FitConfig(progress=False))


def beside_nccl(**options):
    """A loader of one worker, in a process with NCCL's threads, which do not survive a fork."""
    world = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend="nccl")
    loader = DataLoader(numbered(16), batch_size=8, num_workers=1, **options)
    return shared_loader(loader, world, training=False)


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_what_cannot_be_sent_to_workers_beside_nccl_is_one_line():
    with pytest.raises(UserError, match="num_workers 1: workers start anew .*use num_workers 0"):
        next(iter(beside_nccl(collate_fn=lambda batch: batch)))


@pytest.mark.slow  # a process that imports torch
def test_workers_beside_nccl_start_anew():
    shared, whole = beside_nccl(), DataLoader(numbered(16), batch_size=8)
    assert shared.multiprocessing_context.get_start_method() == "forkserver"
    for own, other in zip(shared, whole, strict=True):
        assert all(map(torch.equal, own, other))


def test_steps_without_a_finite_gradient_end_training(world, caplog):
    points, labels = blobs(64).tensors
    loader = DataLoader(TensorDataset(points * math.nan, labels), batch_size=8)
    module, optimizer, criterion, strategy = wrapped(world)
    before = [p.clone() for p in module.parameters()]
    config = FitConfig(max_bad_steps=3, progress=False)
    with pytest.raises(UserError, match="4 in a row, at most 3"):
        fit(module, loader, optimizer, criterion, strategy, config=config)
    assert all(map(torch.equal, before, module.parameters()))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned[0].startswith("epoch 1, batch 0: ")


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_lower_precisions_fit_and_resume(world, precision, tmp_path):
    points, labels = blobs(67).tensors
    train = DataLoader(TensorDataset(points.float(), labels), batch_size=12, shuffle=True)
    results = []
    for run_dir, epochs, resume in ((None, 2, False), (tmp_path, 1, False), (tmp_path, 2, True)):
        strategy = Strategy(StrategyConfig(precision=precision), world)
        module = strategy.wrap(make_net().float())
        optimizer = torch.optim.Adam(strategy.parameters, lr=0.05)
        options = {"validation": train, "run_dir": run_dir, "resume": resume}
        config = FitConfig(epochs=epochs, progress=False)
        found = fit(module, train, optimizer, CRITERION, strategy, config=config, **options)
        results.append((found.history, {k: v.clone() for k, v in module.state_dict().items()}))
    (whole, weights), _, (resumed, again) = results
    assert whole == resumed and equal(weights, again)
    assert whole[1]["valid/loss"] < whole[0]["valid/loss"]
    assert all(value.dtype == torch.float32 for value in weights.values())


def test_what_would_be_overwritten_or_differs_is_refused(world, tmp_path):
    Fitted(world, tmp_path, epochs=1)
    other = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).double()
    for run_dir, options, words in (
        (tmp_path, {"resume": False}, "holds checkpoints already: resume it"),
        (tmp_path, {"batch_size": 6}, r"batch_size 6 \(it has 12\)"),
        (tmp_path, {"net": other}, "another module or optimizer: .*size mismatch"),
        (None, {}, "resume needs a run_dir"),
    ):
        with pytest.raises(UserError, match=words):
            Fitted(world, run_dir, **{"resume": True} | options)
