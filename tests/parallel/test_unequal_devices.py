"""Ranks on unlike devices clip by one norm, and so stay alike."""

import json

import strategy_ranks

from rl_dist.launch.launcher import launch


def test_ranks_whose_devices_round_differently_stay_alike(tmp_path):
    assert launch(strategy_ranks.train_on_unequal_devices, (str(tmp_path),), num_ranks=2) == 0
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    alike = {name for name in first if first[name] == second[name]}
    # left to themselves, ranks of ddp drift apart; a group of shards sums one norm anyway
    assert alike == {"ddp True", "hybrid True", "hybrid False"}
