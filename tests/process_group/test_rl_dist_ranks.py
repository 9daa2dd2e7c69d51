"""Two real ranks over gloo, started once by our launcher."""


def test_two_ranks_find_what_they_must(ranks_folder):
    """They assert it themselves: tests/rl_dist_ranks.py."""
    assert len(list(ranks_folder.glob("done_*"))) == 2
