"""Test the commands, figures and saved results of benchmarks/memory_table.py."""

import json

import pytest

from agents.run.choice import parse_training
from benchmarks import memory_table


@pytest.mark.parametrize("row", memory_table.ROWS, ids=lambda row: row.name)
def test_every_row_is_a_command_with_flags_that_exist(row):
    script, *flags = row.command(3)
    assert script == "train_distributed.py" and flags[-2:] == ["--seed", "3"]
    parse_training(flags)
    assert [other.name for other in memory_table.ROWS].count(row.name) == 1


def test_the_best_window_is_the_highest_mean_over_enough_steps():
    records = [
        (10_000, 1.0, 1),
        (20_000, 0.0, 3),  # end of window 1: mean 1 / 4
        (40_000, None, 0),  # window 2 has no episodes
        (50_000, 0.5, 2),
        (60_000, 0.2, 1),  # end of window 3: mean 1.2 / 3
        (61_000, 1.0, 9),  # ignored: window 4 is incomplete
    ]
    names = "global_step", "episode/return", "episode/count"
    metrics = [dict(zip(names, record, strict=True)) for record in records]
    assert memory_table.best_window(metrics) == pytest.approx(0.4)


def test_the_table_shows_means_and_ranges_over_runs_of_the_same_command(tmp_path, capsys):
    row = memory_table.ROWS[0]
    scores = {1: 0.5, 2: 0.25, 3: 0.9}
    for seed, score in scores.items():
        # The table ignores the result of seed 3, because a different command produced it.
        command = row.command(seed) + ["--gamma", "0"] * (seed == 3)
        result = {"command": command, "without_noise": score, "training": 0.5, "minutes": 1.25}
        memory_table.result_path(tmp_path, row, seed).write_text(json.dumps(result))
    memory_table.main(["--out", str(tmp_path), "--print_only"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 3, "the table must not show rows without results"
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells[0] == row.task and row.published in cells
    assert {"2", "0.375 (0.25 to 0.5)", "0.5", "1.2"} <= set(cells)
