"""--grad_accumulation n, compressed gradients, fewer bits: one rank, and two of two_ranks.py."""

import functools

import pytest
import torch
from speed_ranks import SINGLE, trained

ACCUMULATED = ("one batch", "two parts", "four parts")


@pytest.fixture(scope="module")
def once(world):
    """Trains like `trained`, but the same job only once."""
    return functools.cache(functools.partial(trained, world))


@pytest.fixture(scope="module")
def ranks(ranks_folder):
    """Return the results that two ranks have written."""
    return [torch.load(ranks_folder / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("form", "parts"), [("recall, clstm", 2), ("recall, window, strata of 2", 4)]
)
def test_accumulated_parts_train_like_the_whole_batch(form, parts, once):
    whole = once(form, batch_size=16)
    found = once(form, batch_size=16 // parts, grad_accumulation=parts)
    assert len(found.hashes) == len(whole.hashes)  # gradient steps
    torch.testing.assert_close(found.parameters[-1], whole.parameters[-1], rtol=1e-6, atol=1e-6)
    for losses, expected in zip(found.losses, whole.losses, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", ACCUMULATED)
def test_two_ranks_accumulate_to_the_same_training_and_reduce_once_a_step(name, ranks, once):
    for rank in (rank[name] for rank in ranks):
        parameters = rank["record"]["parameters"][-1]
        torch.testing.assert_close(parameters, once().parameters[-1], rtol=1e-6, atol=1e-6)
        # 2 iterations of 2 epochs of 2 steps
        assert len(rank["record"]["hashes"]) == rank["sent"]["calls"] == 8
        assert rank["sent"]["bytes"] == 8 * rank["gradient_bytes"]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_in_fewer_bits_two_ranks_train_like_one(name, ranks, once):
    alone = once(dtype=SINGLE, precision=name)
    first, second = (rank[name]["record"] for rank in ranks)
    assert first["hashes"] == second["hashes"]
    torch.testing.assert_close(first["parameters"][-1], alone.parameters[-1], rtol=0, atol=0.02)
    for losses, expected in zip(first["losses"], alone.losses, strict=True):
        assert losses["loss/value"] == pytest.approx(expected["loss/value"], rel=0.02)


def test_an_overflow_on_one_rank_is_skipped_by_both_and_halves_the_scale_of_both(ranks):
    first, second = (rank["fp16, overflow on one rank"] for rank in ranks)
    assert first["record"]["hashes"] == second["record"]["hashes"]
    for rank in (first, second):
        losses = rank["record"]["losses"]
        assert [each["optim/skipped_steps"] for each in losses] == [1, 0]
        assert [each["optim/loss_scale"] for each in losses] == [2**15] * 2
        assert rank["bad_in_a_row"] == 0


def test_compressed_gradients_take_half_the_bytes_and_leave_all_ranks_equal(ranks):
    plain = ranks[0]["single"]
    first, second = (rank["compressed"] for rank in ranks)
    assert first["sent"]["bytes"] * 2 == plain["sent"]["bytes"]
    assert first["sent"]["torch.bfloat16"] == first["sent"]["calls"]
    assert first["record"]["hashes"] == second["record"]["hashes"]
    # rounded, and no more
    norms = [
        [losses["optim/grad_norm"] for losses in rank["record"]["losses"]]
        for rank in (first, plain)
    ]
    assert norms[0] != norms[1] and norms[0] == pytest.approx(norms[1], rel=2**-7)
