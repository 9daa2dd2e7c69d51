"""Tests on two real ranks over gloo, started once by our launcher."""

from two_ranks import is_done


def test_the_assertions_on_two_ranks_hold(ranks_folder):
    """The assertions run inside the ranks: see tests/rl_dist_ranks.py."""
    assert is_done(ranks_folder)
