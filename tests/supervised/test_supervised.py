"""Supervised training: the same on any number of ranks, resumed as if never stopped."""

import itertools
import math
import re
import signal
import time
from collections import namedtuple

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
from torch.nn.utils.rnn import pack_sequence
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from rl_dist import check_loader
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.errors import UserError
from rl_dist.launch.ranks import launch
from rl_dist.process_group.world import World, stop_flag
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy
from rl_dist.supervised.batches import BatchError, SharedLoader, to_device
from rl_dist.supervised.config import FitConfig
from rl_dist.supervised.fit import evaluate, fit

SAMPLES = TensorDataset(torch.arange(8), torch.arange(8))
TRAIN = DataLoader(blobs(48), batch_size=8)


def world_of(rank, size, backend="gloo"):
    return World(rank=rank, local_rank=rank, size=size, device=torch.device("cpu"), backend=backend)


def equal(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def wrapped(world, net=None, adam=False, **options):
    """A module, its optimizer, a criterion and the strategy that wrapped it."""
    strategy = Strategy(StrategyConfig(**options), world)
    module = strategy.wrap(net or make_net())
    make = torch.optim.Adam if adam else torch.optim.SGD
    return module, make(strategy.parameters, lr=0.1), CRITERION, strategy


def fitted(world, loader=TRAIN, criterion=CRITERION, parts=None, **options):
    module, optimizer, _, strategy = parts or wrapped(world)
    settings = {"epochs": 2, "progress": False} | options.pop("config", {})
    config = FitConfig(**settings)
    return fit(module, loader, optimizer, criterion, strategy, config=config, **options)


# ---- loaders


def shares(loader, size, *, training, epoch=0):
    """Return the sample numbers of each batch of each rank in an epoch."""
    ranks = [
        SharedLoader(loader, world_of(r, size), training=training, seed=5) for r in range(size)
    ]
    for rank in ranks:
        rank.start(epoch)
    return [rank.batches for rank in ranks]


@pytest.mark.parametrize("num_samples", [7, 8, 23, 101])
def test_evaluation_gives_every_sample_to_one_rank_in_equally_many_batches(num_samples):
    samples = TensorDataset(torch.arange(num_samples))
    for batch_size, size in itertools.product([1, 4, 12, 1000], [1, 2, 3, 7]):
        ranks = shares(DataLoader(samples, batch_size), size, training=False)
        assert len({len(batches) for batches in ranks}) == 1
        batches = list(itertools.chain(*ranks))
        assert sorted(itertools.chain(*batches)) == list(range(num_samples))
        lengths = [len(batch) for batch in batches]
        assert min(lengths) >= 1 and max(lengths) <= max(1, batch_size // size) + 1


def test_a_training_batch_holds_the_same_samples_on_any_number_of_ranks():
    loader = DataLoader(TensorDataset(torch.arange(101)), batch_size=12, shuffle=True)
    epochs = []
    for epoch in (1, 2):
        together = [
            [sorted(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]
            for size in (1, 2, 3, 4)
            for ranks in [shares(loader, size, training=True, epoch=epoch)]
        ]
        assert together == [together[0]] * 4
        assert [len(batch) for batch in together[0]] == [12] * (101 // 12)
        epochs.append(together[0])
    assert epochs[0] != epochs[1] and epochs[0][0] != list(range(12))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "training", "words"),
    [
        (DataLoader(Stream(), batch_size=2), True, "length"),
        (DataLoader(SAMPLES, 2, sampler=WeightedRandomSampler([1.0] * 8, 8)), True, "Weighted"),
        (DataLoader(SAMPLES, 2, sampler=RandomSampler(SAMPLES, replacement=True)), True, "Random"),
        (DataLoader(SAMPLES, batch_sampler=[[0, 1], [2, 3]]), True, "batch_sampler"),
        (DataLoader(SAMPLES, batch_size=3), True, "batch_size 3.* 2 ranks.* use 2"),
        (DataLoader(SAMPLES, batch_size=10), True, "batch_size 10.* 8 samples.* use 8"),
        (DataLoader(TensorDataset(torch.zeros(1)), 2), False, "1 samples .* 2 ranks"),
        ([SAMPLES], True, "DataLoader.* got a list"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_name(loader, training, words):
    with pytest.raises(UserError, match=words):
        SharedLoader(loader, world_of(0, 2), training=training)


def test_batches_of_any_nesting_are_moved():
    pair = namedtuple("Pair", "inputs label")(torch.zeros(5, 2), "y")
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    batch = {"meta": "x", "pair": pair, "list": [torch.ones(5), (torch.ones(5),)], "packed": packed}
    moved = to_device(batch, torch.device("meta"))
    tensors = moved["pair"].inputs, moved["list"][0], moved["list"][1][0], moved["packed"].data
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved["meta"] == "x" and moved["pair"].label == "y"
    assert moved["packed"].batch_sizes.tolist() == [2, 1, 1]  # torch needs batch_sizes on the CPU


def test_workers_beside_nccl_are_not_forked():
    loader = DataLoader(SAMPLES, batch_size=8, num_workers=1)
    shared = SharedLoader(loader, world_of(0, 1, "nccl"), training=False)
    assert shared.loader.multiprocessing_context.get_start_method() == "forkserver"


class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


def test_waiting_and_stepping_are_measured_apart_and_draw_no_random_numbers():
    torch.manual_seed(5)
    check = check_loader(DataLoader(Slow(SAMPLES.tensors[0]), 2), lambda batch: time.sleep(0.02))
    assert check["wait_s"] >= 0.02 and check["step_s"] >= 0.02
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(5)))
    with pytest.raises(UserError, match="fewer than two batches"):
        check_loader(DataLoader(SAMPLES, batch_size=8), lambda batch: None)


# ---- several ranks


@pytest.fixture(scope="module")
def ranks(ranks_folder, tmp_path_factory):
    """Return the results of two ranks, and the same of one rank."""
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
        train = [record["train/loss"] for record in found["bad_history"]]
        assert math.isnan(train[0]) and train[2] < train[1] < 1.1
    assert all(value.isfinite().all() for value in one["bad"].values())
    torch.testing.assert_close(two[0]["bad"], one["bad"], rtol=0, atol=1e-12)


def test_running_statistics_are_means_over_ranks_and_other_buffers_those_of_rank_0(ranks):
    (left, right), _ = ranks
    assert equal(left["batch_norm"], right["batch_norm"])
    for name in ("seen", "net.1.running_mean"):
        assert left["batch_norm"][name].abs().sum() > 0


def test_a_sample_that_cannot_be_loaded_is_named_by_the_rank_that_has_it(ranks):
    found = [rank["raised"].partition(": ") for rank in (*ranks[0], ranks[1])]
    places = ["evaluation, batch 5, rank 0", "evaluation, batch 5, rank 1"]
    assert [place for place, _, _ in found] == [*places, "evaluation, batch 2, rank 0"]
    assert found[1][2] == "OSError: image 40 is torn"


def test_a_rank_that_leaves_after_its_error_does_not_keep_the_others_waiting(tmp_path, capfd):
    assert launch(leave_on_one_rank, (str(tmp_path),), 2) == 1
    # either the watchdog reports first, or gloo finds the connection closed
    words = "for rank 1, which has left after collective|rank 0: the connection broke"
    assert re.search(words, capfd.readouterr().err)


# ---- one rank


def test_accumulated_batches_equal_one_larger_batch(world):
    found = []
    for batch_size, parts in ((16, 1), (8, 2), (4, 4)):
        job = wrapped(world)
        steps = []
        job[1].register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        loader = DataLoader(blobs(48), batch_size=batch_size)
        fitted(world, loader, parts=job, config={"grad_accumulation": parts})
        found.append([p.detach() for p in job[0].parameters()])
        assert len(steps) == 6
    torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=0, atol=1e-12)


def test_fitting_stops_when_validation_gets_no_better_and_keeps_the_best(world, tmp_path):
    data = {"validation": DataLoader(blobs(31, 1, flipped=True), batch_size=12)}
    config = {"patience": 2, "epochs": 20}
    whole = Fitted(world, tmp_path, config=config, **data)
    losses = [record["valid/loss"] for record in whole.result.history]
    best = whole.result.best_epoch
    assert len(losses) == best + 2 < 20 and losses[best - 1] == min(losses)
    best_file = tmp_path / "checkpoints" / "best.pt"
    assert equal(whole.weights, load_checkpoint(best_file)["module"])
    again = evaluate(whole.module, data["validation"], CRITERION, whole.strategy, METRICS)
    assert again["loss"] == losses[best - 1]
    resumed = Fitted(world, tmp_path, config=config, resume=True, **data)
    assert equal(resumed.weights, whole.weights)
    assert resumed.result.history == whole.result.history
    best_file.unlink()  # its weights are nowhere else
    with pytest.raises(ValueError, match=r"best\.pt"):
        Fitted(world, tmp_path, config=config, resume=True, **data)


def test_tensorboard_continues_where_a_resumed_fit_does(world, tmp_path):
    Fitted(world, tmp_path, epochs=2)
    history = Fitted(world, tmp_path, epochs=4, resume=True).result.history
    for tag in ("train/loss", "train/accuracy", "valid/loss", "valid/accuracy"):
        expected = [(k, pytest.approx(record[tag])) for k, record in enumerate(history, 1)]
        assert seen(tmp_path, tag) == expected and len(expected) == 4


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
    with pytest.raises(BatchError, match="epoch 1, batch 2, rank 0: OSError: .*image 17 is torn"):
        fitted(world, loader)


def test_steps_without_a_finite_gradient_end_training(world, caplog):
    points, labels = blobs(64).tensors
    loader = DataLoader(TensorDataset(points * math.nan, labels), batch_size=8)
    job = wrapped(world)
    before = [p.clone() for p in job[0].parameters()]
    with pytest.raises(UserError, match="4 in a row, at most 3"):
        fitted(world, loader, parts=job, config={"max_bad_steps": 3})
    assert all(map(torch.equal, before, job[0].parameters()))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned[0].startswith("epoch 1, batch 0: ")


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_lower_precisions_fit_and_resume(world, precision, tmp_path):
    points, labels = blobs(67).tensors
    train = DataLoader(TensorDataset(points.float(), labels), batch_size=12, shuffle=True)
    results = []
    for run_dir, epochs, resume in ((None, 2, False), (tmp_path, 1, False), (tmp_path, 2, True)):
        job = wrapped(world, make_net().float(), adam=True, precision=precision)
        options = {"validation": train, "run_dir": run_dir, "resume": resume}
        found = fitted(world, train, parts=job, config={"epochs": epochs}, **options)
        results.append((found.history, {k: v.clone() for k, v in job[0].state_dict().items()}))
    (whole, weights), _, (resumed, again) = results
    assert whole == resumed and equal(weights, again)
    assert whole[1]["valid/loss"] < whole[0]["valid/loss"]
    assert all(value.dtype == torch.float32 for value in weights.values())


def test_what_would_be_overwritten_or_differs_is_refused(world, tmp_path):
    fitted(world, run_dir=tmp_path)
    other = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).double()
    job = wrapped(world)
    cases = (
        (tmp_path, {"resume": False}, str(tmp_path)),
        (tmp_path, {"loader": DataLoader(blobs(48), batch_size=6)}, r"batch_size 6 \(it has 8\)"),
        (tmp_path, {"parts": wrapped(world, adam=True)}, r"optimizer Adam \(it has SGD\)"),
        (tmp_path, {"scheduler": StepLR(job[1], 1)}, r"scheduler StepLR \(it has none\)"),
        (tmp_path, {"parts": wrapped(world, other)}, "module"),
        (None, {}, "run_dir"),
    )
    for run_dir, options, words in cases:
        with pytest.raises(UserError, match=words):
            fitted(world, **{"run_dir": run_dir, "resume": True, "config": {"epochs": 4}} | options)


@pytest.mark.parametrize("resume", [False, True])
def test_checkpoints_are_not_written_through_a_link(world, tmp_path, resume):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(elsewhere)
    with pytest.raises(UserError, match="checkpoints"):
        fitted(world, run_dir=tmp_path / "run", resume=resume)
    assert not any(elsewhere.iterdir())


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = make_net(), make_net()

    def forward(self, inputs):
        return self.used(inputs)


def half_frozen(world):
    net = make_net()
    net[0].requires_grad_(False)
    module, _, criterion, strategy = wrapped(world, net, mode="ddp")
    net.requires_grad_(True)
    return module, torch.optim.SGD(net.parameters(), lr=0.1), criterion, strategy


TRIPLES = DataLoader(TensorDataset(*blobs(48).tensors, torch.ones(48)), 8)
MISTAKES = {
    "patience without validation": {"config": {"patience": 2}},
    "a plateau without validation": {"scheduler": lambda job: ReduceLROnPlateau(job[1])},
    "a module that is not wrapped": {"parts": lambda world: (make_net(), *wrapped(world)[1:])},
    "a metric that is a mean": {"metrics": {"x": lambda o, t: o.mean()}},
    "a metric called loss": {"metrics": {"loss": METRICS["accuracy"]}},
    "an unused parameter": {"parts": lambda world: wrapped(world, TwoHeads(), mode="ddp")},
    "a gradient that is not reduced": {"parts": half_frozen},
    "a criterion that returns no mean": {"criterion": nn.CrossEntropyLoss(reduction="none")},
    "batches that are no pairs": {"loader": TRIPLES},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_call_is_an_error_and_no_training(mistake, world):
    options = dict(MISTAKES[mistake])
    job = options["parts"] = options.get("parts", wrapped)(world)
    if "scheduler" in options:
        options["scheduler"] = options["scheduler"](job)
    with pytest.raises((UserError, BatchError)):
        fitted(world, **options)


def test_unused_parameters_and_targets_of_any_kind_are_taken_where_asked_for(world):
    parts = wrapped(world, TwoHeads(), mode="ddp", find_unused_parameters=True)
    collate = lambda rows: (torch.stack([row[0] for row in rows]), ["cat"] * len(rows))  # noqa: E731
    loader = DataLoader(blobs(20), 6, collate_fn=collate)
    criterion = lambda outputs, targets: outputs.square().mean()  # noqa: E731
    record = fitted(world, loader, criterion, parts, validation=loader).history[-1]
    assert record["train/samples"] == 18 and record["valid/samples"] == 20


def test_a_scheduler_that_waits_for_a_plateau_sees_the_validation_loss(world):
    job = wrapped(world)
    scheduler = ReduceLROnPlateau(job[1], patience=0, threshold=10.0, threshold_mode="abs")
    result = fitted(world, parts=job, validation=TRAIN, scheduler=scheduler)
    assert scheduler.best == result.history[0]["valid/loss"]
    assert job[1].param_groups[0]["lr"] == pytest.approx(0.01)
