"""Tests on two real ranks over gloo; our launcher starts them once."""


def test_two_ranks_find_what_they_must(ranks_folder):
    """The assertions run inside the ranks: see tests/rl_dist_ranks.py."""
    assert len(list(ranks_folder.glob("done_*"))) == 2
