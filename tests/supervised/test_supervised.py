"""Test that rank counts and interruptions do not change supervised training."""

import itertools
import math
import signal
import time

import pytest
import torch
from supervised_ranks import (
    CRITERION,
    METRICS,
    UNEQUAL,
    Fitted,
    blobs,
    exercise,
    make_net,
    partly_ignored,
)
from tensorboard_readers import scalars
from torch.nn.utils.rnn import pack_sequence
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from rl_dist import check_loader
from rl_dist.errors import UserError
from rl_dist.process_group.world import World, stop_flag
from rl_dist.supervised.batches import check_shares, shared_batches, to_device
from rl_dist.supervised.fit import evaluate

SAMPLES = TensorDataset(torch.arange(8), torch.arange(8))


def world_of(rank, size):
    return World(rank, rank, size, torch.device("cpu"), "gloo", size)


def equal(left, right):
    return left.keys() == right.keys() and all(map(torch.equal, left.values(), right.values()))


# ---- loaders


def shares(size, count, batch_size, *, epoch=0):
    """Return the sample numbers of an epoch as a list of batches for each rank."""
    data = TensorDataset(*torch.arange(count).expand(2, -1))
    loader = DataLoader(data, batch_size, shuffle=bool(epoch))
    ranks = []
    for rank in range(size):
        world = world_of(rank, size)
        share = shared_batches(loader, world, training=bool(epoch), seed=5, epoch=epoch)
        ranks.append([inputs.tolist() for _, inputs, _ in share])
    return ranks


@pytest.mark.parametrize("num_samples", [7, 23, 25])
def test_evaluation_gives_every_sample_to_one_rank_in_equally_many_batches(num_samples):
    for batch_size, size in itertools.product([1, 4, 12, 1000], [1, 2, 3, 7]):
        ranks = shares(size, num_samples, batch_size)
        assert len({len(batches) for batches in ranks}) == 1
        seen = list(itertools.chain(*itertools.chain(*ranks)))
        assert sorted(seen) == list(range(num_samples))


def test_a_training_batch_holds_the_same_samples_on_any_number_of_ranks():
    epochs = []
    for epoch in (1, 2):
        alone, *others = [
            [sorted(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]
            for ranks in (shares(size, 101, 12, epoch=epoch) for size in (1, 2, 3, 4))
        ]
        assert others == [alone] * 3 and [len(batch) for batch in alone] == [12] * (101 // 12)
        epochs.append(alone)
    assert epochs[0] != epochs[1] and epochs[0][0] != list(range(12))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"batch_size": 2, "sampler": WeightedRandomSampler([1.0] * 8, 8)}, "Weighted"),
        ({"batch_size": 2, "sampler": RandomSampler(SAMPLES, replacement=True)}, "Random"),
        ({"batch_sampler": [[0, 1], [2, 3]]}, "batch_sampler"),
        ({"batch_size": 3}, "batch_size 3.* 2 ranks.* use 2"),
        ({"batch_size": 10}, "batch_size 10.* 8 samples.* use 8"),
        ({"batch_size": 2, "sampler": SequentialSampler([1])}, "1 samples .* 2 ranks"),
    ],
)
def test_a_loader_that_does_not_divide_over_the_ranks_is_refused(options, words):
    with pytest.raises(UserError, match=words):
        check_shares(DataLoader(SAMPLES, **options), world_of(0, 2), training=True)


def test_a_random_sampler_draws_from_all_samples_in_training():
    loader = DataLoader(SAMPLES, 2, sampler=RandomSampler(SAMPLES, num_samples=2))
    seen = set()
    for rank, epoch in itertools.product((0, 1), range(40)):
        share = shared_batches(loader, world_of(rank, 2), training=True, epoch=epoch)
        seen.update(*(inputs.tolist() for _, inputs, _ in share))
    assert len(seen) == 8
    with pytest.raises(UserError, match="num_samples"):
        check_shares(loader, world_of(0, 1), training=False)


def test_a_loader_that_makes_its_own_batches_is_refused():
    class Own(DataLoader):
        def __iter__(self):
            return iter([])

    with pytest.raises(UserError, match="__iter__"):
        check_shares(Own(SAMPLES, 2), world_of(0, 1), training=True)


@pytest.mark.parametrize(
    "data, form",
    [
        ([{"image": torch.ones(6), "label": 1}] * 4, "dict of 2"),
        ([(torch.ones(6), 1, 0.5)] * 4, "list of 3"),
    ],
)
def test_a_batch_that_is_no_pair_is_refused(data, form):
    with pytest.raises(UserError, match=form):
        next(shared_batches(DataLoader(data, 2), world_of(0, 1), training=True))


def test_nested_batches_move_to_the_device_as_a_whole():
    packed = pack_sequence([torch.ones(3, 2)])
    moved = to_device({"name": "x", "list": [torch.ones(5), (packed,)]}, torch.device("meta"))
    first, (second,) = moved["list"]
    assert first.is_meta and second.data.is_meta and moved["name"] == "x"


def test_waiting_for_data_and_stepping_are_timed_separately():
    class Slow(TensorDataset):
        def __getitem__(self, index):
            time.sleep(0.01)
            return super().__getitem__(index)

    check = check_loader(DataLoader(Slow(torch.arange(8)), 2), lambda batch: time.sleep(0.02))
    assert check["wait_s"] >= 0.02 and check["step_s"] >= 0.02


# ---- several ranks


@pytest.fixture(scope="module")
def ranks(ranks_folder, tmp_path_factory):
    """Return three results: of the two ranks of one world, and of a rank on its own."""
    alone = tmp_path_factory.mktemp("one")
    exercise(str(alone))
    paths = [ranks_folder / "rank_0.pt", ranks_folder / "rank_1.pt", alone / "rank_0.pt"]
    return [torch.load(path, weights_only=True) for path in paths]


def test_two_ranks_fit_like_one(ranks):
    left, right, one = ranks
    assert left["hash"] == right["hash"]
    for record, alone in zip(right["history"], one["history"], strict=True):
        assert record == pytest.approx(alone, abs=1e-12)
    assert one["history"][-1]["train/loss"] < one["history"][0]["train/loss"]


def test_two_ranks_count_every_sample_of_an_evaluation_once(ranks):
    left, right, one = ranks
    assert left["test"] == right["test"] and left["test"]["samples"] == 41
    assert left["test"] == pytest.approx(one["test"], rel=1e-12)


def test_resumed_ranks_end_bit_for_bit_as_uninterrupted_ones(ranks):
    for rank in ranks:
        assert equal(rank["whole"]["weights"], rank["resumed"]["weights"])
        assert rank["whole"]["history"] == rank["resumed"]["history"]
    left, right = (rank["whole"]["weights"] for rank in ranks[:2])
    assert equal(left, right) and left["1.running_mean"].abs().sum() > 0


@pytest.mark.parametrize("job", ["weights", "across strategies", "workers"])
def test_strategies_and_workers_change_nothing(ranks, job):
    for rank in ranks:
        torch.testing.assert_close(rank[job], ranks[-1]["weights"], rtol=0, atol=1e-12)


def test_a_nan_loss_on_one_rank_skips_the_step_on_all_ranks(ranks):
    for bad in (rank["bad"] for rank in ranks):
        first, second, third = (record["train/loss"] for record in bad["history"])
        assert math.isnan(first) and third < second < 1.1
        torch.testing.assert_close(bad["weights"], ranks[-1]["bad"]["weights"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [*UNEQUAL, "evaluation"])
def test_a_criterion_with_unequal_weights_is_refused_on_two_ranks(ranks, name):
    assert ["reduction='none'" in rank["unequal"][name] for rank in ranks] == [True, True, False]


@pytest.mark.parametrize("name", ["per sample", "per sample, accumulated"])
def test_losses_per_sample_train_the_same_on_any_number_of_ranks(ranks, name):
    for rank in ranks:
        torch.testing.assert_close(rank[name], ranks[-1]["per sample"], rtol=0, atol=1e-12)


def test_unused_parameters_are_named_before_the_ranks_drift_apart(ranks):
    assert ["['spare']" in rank["unused"] for rank in ranks] == [True, True, False]


# ---- one rank


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_whose_batch_has_only_ignored_targets_is_skipped(world, parts):
    loader = DataLoader(partly_ignored(4 * parts, *range(4)), batch_size=4)
    config = {"grad_accumulation": parts}
    job = Fitted(world, train=loader, validation=None, epochs=1, config=config)
    assert job.result.bad_in_a_row == 1 and equal(job.weights, make_net().state_dict())


def test_accumulation_refuses_a_criterion_with_unequal_weights(world):
    with pytest.raises(UserError, match="reduction='none'"):
        Fitted(world, **UNEQUAL["class weights"])


def test_batch_norm_with_one_sample_names_the_batch_size(world):
    with pytest.raises(UserError, match="use batch_size 2"):
        Fitted(world, net=make_net(batch_norm=True), batch_size=1)


def test_accumulated_batches_equal_one_larger_batch(world):
    options = {"optimizer": torch.optim.SGD, "epochs": 2, "validation": None}

    def weights(batch_size, parts):
        loader = DataLoader(blobs(48), batch_size=batch_size)
        job = Fitted(world, train=loader, config={"grad_accumulation": parts}, **options)
        return job.weights

    torch.testing.assert_close(weights(4, 4), weights(16, 1), rtol=0, atol=1e-12)


def test_fitting_stops_without_progress_in_validation_and_keeps_the_best_weights(world, tmp_path):
    held_out = DataLoader(blobs(31, 1, flipped=True), batch_size=12)
    options = {"validation": held_out, "config": {"patience": 2, "epochs": 20}, "resume": True}
    whole = Fitted(world, tmp_path, **options)
    losses = [record["valid/loss"] for record in whole.history]
    best = whole.result.best_epoch
    assert len(losses) == best + 2 < 20 and losses[best - 1] == min(losses)
    again = evaluate(whole.module, held_out, CRITERION, whole.strategy)
    assert again["loss"] == min(losses)

    # Resume a finished fit. Only best.pt still contains the best weights, so it must be loaded.
    resumed = Fitted(world, tmp_path, **options)
    assert equal(resumed.weights, whole.weights) and resumed.history == whole.history
    (tmp_path / "checkpoints" / "best.pt").unlink()
    with pytest.raises(ValueError, match=r"best\.pt"):
        Fitted(world, tmp_path, **options)


def test_a_plateau_scheduler_gets_the_validation_loss(world):
    net = make_net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(sgd)
    job = Fitted(world, net=net, optimizer=lambda *_, lr: sgd, scheduler=scheduler, epochs=1)
    assert scheduler.best == job.history[0]["valid/loss"]


def test_a_stop_signal_ends_an_epoch_early_and_a_resume_repeats_it(world, tmp_path, monkeypatch):
    whole = Fitted(world, tmp_path / "whole", batch_size=2)
    calls = itertools.count(1)

    def counting(outputs, targets):
        # Call 60 is in epoch 2: an epoch has 33 training and 16 validation batches.
        if next(calls) == 60:
            stop_flag.signum = signal.SIGTERM
        return METRICS["accuracy"](outputs, targets)

    monkeypatch.setattr(stop_flag, "signum", 0)
    stopped = Fitted(world, tmp_path / "parts", batch_size=2, metrics={"accuracy": counting})
    assert stopped.result.signum == signal.SIGTERM and len(stopped.history) == 1
    stop_flag.signum = 0
    resumed = Fitted(world, tmp_path / "parts", batch_size=2, resume=True)
    assert equal(resumed.weights, whole.weights) and resumed.history == whole.history
    expected = [(k, pytest.approx(r["valid/accuracy"])) for k, r in enumerate(whole.history, 1)]
    assert scalars(tmp_path / "whole")["valid/accuracy"] == expected and len(expected) == 3


def test_steps_without_a_finite_gradient_end_training(world):
    points, labels = blobs(64).tensors
    loader = DataLoader(TensorDataset(points * math.nan, labels), batch_size=8)
    net = make_net()
    with pytest.raises(UserError, match="4 steps in a row.*max_bad_steps 3"):
        Fitted(world, net=net, train=loader, config={"max_bad_steps": 3, "grad_accumulation": 1})
    assert equal(net.state_dict(), make_net().state_dict())


def test_a_wrong_validation_is_refused_before_the_first_step(world):
    net = make_net()
    with pytest.raises(UserError, match="batch_sampler"):
        Fitted(world, net=net, validation=DataLoader(SAMPLES, batch_sampler=[[0]]))
    assert equal(net.state_dict(), make_net().state_dict())


def test_a_resume_that_would_overwrite_or_that_differs_is_refused(world, tmp_path):
    Fitted(world, tmp_path, epochs=1)
    for options, words in (
        ({"resume": False}, str(tmp_path)),
        ({"batch_size": 6}, "batch_size is 6, but 12"),
        ({"scheduler": None}, "scheduler is NoneType, but StepLR"),
        ({"net": make_net(batch_norm=True)}, "state_dict"),
    ):
        with pytest.raises((UserError, RuntimeError), match=words):
            Fitted(world, tmp_path, **{"resume": True, "epochs": 4} | options)


def test_an_evaluation_leaves_the_mode_of_the_module(world):
    fitted = Fitted(world, epochs=1)
    held_out = DataLoader(blobs(8), batch_size=4)
    for is_training in (True, False):
        fitted.module.train(is_training)
        evaluate(fitted.module, held_out, CRITERION, fitted.strategy)
        assert fitted.module.training == is_training
