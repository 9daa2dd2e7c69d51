"""--grad_accumulation n, compressed gradients: one rank, and two in two_ranks.py."""

import functools
import itertools
import weakref

import pytest
import torch
from speed_ranks import SINGLE, job_of, trained
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agents.config import TrainConfig
from agents.run.sizes import shard_sizes
from agents.trainer import Training, train
from rl_dist.process_group.world import StopFlag
from rl_dist.telemetry.metrics import NullWriter

PARTS = [{"batch_size": 8, "grad_accumulation": 2}, {"batch_size": 4, "grad_accumulation": 4}]
FORMS = [("recall, clstm", PARTS[0]), ("recall, window, strata of 2", PARTS[1])]


@pytest.fixture(scope="module")
def once(world):
    """Trains like `trained`, but the same job only once."""
    return functools.cache(functools.partial(trained, world))


@pytest.fixture(scope="module")
def ranks(ranks_folder):
    """What each of two ranks has written."""
    return [torch.load(ranks_folder / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)]


def last(training):
    return training.parameters[-1]


# ---- accumulation


@pytest.mark.parametrize(("form", "options"), FORMS, ids=str)
def test_accumulated_parts_train_like_the_whole_batch(form, options, once):
    whole = once(form, batch_size=16)
    parts = once(form, **options)
    assert len(parts.hashes) == len(whole.hashes)  # gradient steps
    torch.testing.assert_close(last(parts), last(whole), rtol=1e-6, atol=1e-6)
    for of_parts, of_whole in zip(parts.losses, whole.losses, strict=True):
        assert of_parts == pytest.approx(of_whole, rel=1e-6, abs=1e-9)


def test_in_single_precision_the_first_gradient_is_that_of_the_whole_batch_to_1e_6(world):
    def first_gradient(**options):
        training = trained(world, dtype=SINGLE, iterations=1, **options)
        return training.losses[0]["optim/grad_norm"]

    assert first_gradient(**PARTS[0]) == pytest.approx(first_gradient(batch_size=16), rel=1e-6)


ON_TWO_RANKS = ("one batch", "two parts", "four parts")


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_accumulate_to_the_same_training(name, ranks, once):
    for rank in ranks:
        parameters = rank[name]["record"]["parameters"][-1]
        torch.testing.assert_close(parameters, last(once()), rtol=1e-6, atol=1e-6)


def test_gradients_travel_once_per_step_however_many_parts_it_has(ranks):
    for rank, name in itertools.product(ranks, ON_TWO_RANKS):
        sent, steps = rank[name]["sent"], len(rank[name]["record"]["hashes"])
        assert steps == 8  # 2 iterations of 2 epochs of 2 steps
        assert (sent["calls"], sent["bytes"]) == (steps, steps * rank[name]["gradient_bytes"])


class TrackedTensors(TorchDispatchMode):
    """Counts the bytes of all tensors made inside, until they are gone."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage):
        key = storage.data_ptr()
        if key in self._known or not storage.nbytes():
            return
        self._known[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key):
        self.live -= self._known.pop(key)


def test_accumulation_takes_less_memory(world):
    sizes = {"num_envs": 32, "num_steps": 16, "bptt_steps": 8, "dtype": SINGLE}
    peaks = []
    for batch in ({"batch_size": 64}, {"batch_size": 8, "grad_accumulation": 8}):
        with TrackedTensors() as tracked:
            train(Training(job_of(**batch, **sizes), world), NullWriter(), StopFlag())
        peaks.append(tracked.peak)
    assert peaks[1] < 0.9 * peaks[0]


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "words"),
    [
        ({"num_envs": 8, "grad_accumulation": 3}, 1, "grad_accumulation 3.*try --num_envs 12"),
        ({"grad_accumulation": 0}, 1, "grad_accumulation must be"),
        ({"batch_size": 7, "grad_accumulation": 2}, 2, "batch_size 7 does not divide over 2 ranks"),
    ],
)
def test_sizes_that_cannot_be_accumulated_are_refused_by_name(sizes, num_ranks, words):
    given = {"batch_size": 8, "num_steps": 16, "bptt_steps": 8} | sizes
    with pytest.raises(ValueError, match=words):
        shard_sizes(TrainConfig(**given), 0, num_ranks)


# ---- precision on two ranks


def test_in_fewer_bits_two_ranks_train_like_one(ranks, once):
    for name in ("bf16", "fp16"):
        alone = once(dtype=SINGLE, precision=name)
        both = [rank[name]["record"] for rank in ranks]
        assert both[0]["hashes"] == both[1]["hashes"]
        torch.testing.assert_close(both[0]["parameters"][-1], last(alone), rtol=0, atol=0.02)
        for losses, of_one in zip(both[0]["losses"], alone.losses, strict=True):
            assert losses["loss/value"] == pytest.approx(of_one["loss/value"], rel=0.02)


def test_an_overflow_on_one_rank_is_skipped_by_both_and_halves_the_scale_of_both(ranks):
    both = [rank["fp16, overflow on one rank"] for rank in ranks]
    assert both[0]["record"]["hashes"] == both[1]["record"]["hashes"]
    for rank in both:
        losses = rank["record"]["losses"]
        assert [each["optim/skipped_steps"] for each in losses] == [1, 0]
        assert [each["optim/loss_scale"] for each in losses] == [2**15] * 2
        assert rank["bad_in_a_row"] == 0


# ---- compressed gradients


def test_compressed_gradients_take_half_the_bytes_and_leave_all_ranks_alike(ranks):
    plain, compressed = ([rank[name] for rank in ranks] for name in ("single", "compressed"))
    assert compressed[0]["sent"]["bytes"] * 2 == plain[0]["sent"]["bytes"]
    assert compressed[0]["sent"]["torch.bfloat16"] == compressed[0]["sent"]["calls"]
    assert compressed[0]["record"]["hashes"] == compressed[1]["record"]["hashes"]
    # rounded, and no more
    losses = [each[0]["record"]["losses"] for each in (plain, compressed)]
    norms = [[one["optim/grad_norm"] for one in each] for each in losses]
    assert norms[0] != norms[1] and norms[1] == pytest.approx(norms[0], rel=2**-7)
