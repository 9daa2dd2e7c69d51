"""Tests on two real ranks over gloo, started once by our launcher."""


def test_the_assertions_on_two_ranks_hold(ranks_folder):
    """The assertions run inside the ranks: see tests/rl_dist_ranks.py."""
    assert len(list(ranks_folder.glob("done_*"))) == 2
