"""Training on two ranks with accumulated, compressed, bf16 or fp16 gradients."""

import pytest
import torch
from speed_ranks import FORMS, first_gradient, trained


def test_two_ranks_that_accumulate_train_like_one_and_reduce_once_per_step(ranks, world):
    alone = trained(world)  # one rank, without accumulation
    for rank in (rank["two parts"] for rank in ranks):
        parameters, losses = rank["record"]["parameters"][-1], rank["record"]["losses"]
        torch.testing.assert_close(parameters, alone.parameters[-1], rtol=1e-6, atol=1e-6)
        for one, other in zip(losses, alone.losses, strict=True):
            assert one == pytest.approx(other, rel=1e-6, abs=1e-9)
        # 2 iterations, each with 2 epochs of 2 steps
        assert len(rank["record"]["hashes"]) == rank["sent"]["calls"] == 8
        assert rank["sent"]["bytes"] == 8 * rank["gradient_bytes"]


def test_an_overflow_on_one_rank_is_skipped_by_both_and_halves_the_scale_of_both(ranks):
    first, second = (rank["fp16, overflow on one rank"] for rank in ranks)
    assert first["record"]["hashes"] == second["record"]["hashes"]
    for rank in (first, second):
        losses = rank["record"]["losses"]
        assert [each["optim/skipped_steps"] for each in losses] == [1, 0]
        assert [each["optim/loss_scale"] for each in losses] == [2**15] * 2
        assert rank["bad_in_a_row"] == 0  # overflows do not count as bad steps


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_in_bf16_have_the_gradient_of_one(form, ranks, world):
    alone = first_gradient(world)
    for rank in ranks:
        for part, whole in zip(rank["bf16"][form], alone, strict=True):
            # each rank rounds its gradients to 8 bits
            assert (part - whole).norm() < 0.01 * whole.norm()


def test_compressed_gradients_take_half_the_bytes_and_leave_all_ranks_equal(ranks):
    plain = ranks[0]["single"]
    first, second = (rank["compressed"] for rank in ranks)
    assert first["sent"]["bytes"] * 2 == plain["sent"]["bytes"]
    assert first["record"]["hashes"] == second["record"]["hashes"]
    # The only effect of compression is that gradients are rounded.
    rounded, exact = (rank["record"]["losses"][0]["optim/grad_norm"] for rank in (first, plain))
    assert rounded != exact and rounded == pytest.approx(exact, rel=2**-7)
