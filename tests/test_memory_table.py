"""benchmarks/memory_table.py: its commands exist, its figures are right, results are kept."""

import json
import shlex

import pytest

from agents.run.choice import parse_training
from benchmarks import memory_table


def iteration(step, mean, count):
    return {"global_step": step, "episode/return": mean, "episode/count": count}


def store(out, row, seed, score):
    command = row.command(seed)
    result = {"command": command, "without_noise": score, "training": 0.5, "minutes": 1.25}
    path = memory_table.result_path(out, row, seed)
    path.write_text(json.dumps(result))
    return path


@pytest.mark.parametrize("row", memory_table.ROWS, ids=lambda row: row.name)
def test_every_row_is_a_command_with_flags_that_exist(row):
    script, *flags = row.command(3)
    assert script == "train_distributed.py" and flags[-2:] == ["--seed", "3"]
    parse_training(flags)
    assert [other.name for other in memory_table.ROWS].count(row.name) == 1


def test_the_best_window_is_a_mean_over_the_episodes_of_many_steps():
    metrics = [
        iteration(10_000, 1.0, 1),
        iteration(20_000, 0.0, 3),  # ends the first window: 1 / 4
        iteration(40_000, None, 0),  # a window without episodes
        iteration(50_000, 0.5, 2),
        iteration(60_000, 0.2, 1),  # 1.2 / 3
        iteration(61_000, 1.0, 9),  # too short a window
    ]
    assert memory_table.best_window(metrics) == pytest.approx(0.4)
    assert memory_table.best_window(metrics[:1]) == 1.0  # all that there is
    assert memory_table.best_window([metrics[2]]) is None


def test_the_table_has_means_with_their_ranges_beside_published_figures(tmp_path, capsys):
    row = memory_table.ROWS[0]
    for seed, score in ((1, 0.5), (2, 0.25)):
        store(tmp_path, row, seed, score)
    memory_table.main(["--out", str(tmp_path), "--print_only"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 3, "a row without results"
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells[0] == row.task and row.published in cells
    assert "0.375 (0.25 to 0.5)" in cells and "0.5" in cells and "1.2" in cells


def test_a_result_of_another_command_does_not_count(tmp_path):
    row = memory_table.ROWS[0]
    path = store(tmp_path, row, 1, 0.5)
    assert memory_table.stored(path, row.command(1))["without_noise"] == 0.5
    assert memory_table.stored(path, [*row.command(1), "--gamma", "0"]) is None
    assert memory_table.stored(path.with_suffix(""), row.command(1)) is None


@pytest.mark.slow
def test_a_row_of_popgym_trains_once_and_is_printed_again(tmp_path, monkeypatch, capsys):
    pytest.importorskip("popgym", reason="the extra popgym is not installed")
    row = memory_table.popgym("AutoencodeEasy", 8192, "-", "--eval_episodes 2")  # a Tuple
    monkeypatch.setattr(memory_table, "ROWS", [row])
    command = ["--seeds", "1", "--out", str(tmp_path)]
    memory_table.main(command)
    first = capsys.readouterr().out
    assert shlex.join(row.command(1)) in first and "| AutoencodeEasy |" in first
    result = json.loads(memory_table.result_path(tmp_path, row, 1).read_text())
    assert result["steps"] == 8192 and -1 <= result["training"] <= 1
    monkeypatch.setattr(memory_table, "train", None)  # calling it would fail
    memory_table.main(command)
    assert capsys.readouterr().out in first
