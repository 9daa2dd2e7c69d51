"""Test the commands, figures and stored results of benchmarks/task_table.py."""

import json
import re
from dataclasses import replace

import pytest
import task_table

from agents.run.choice import parse_training

ROWS, SOURCES = task_table.read_rows()


def result_of(row, seed, score, **changes):
    """Return a stored result whose learning curve rises to twice the return."""
    result = {"row": row.name, "seed": seed, "command": row.command(seed), "device": "cpu"}
    result |= {"preset": row.preset, "settings": task_table.settings_of(row.preset)}
    result |= {"return": score, "best": score, "end": score, "cpu_minutes": 1.5}
    return result | {"curve": [[row.steps // 2, score], [row.steps, 2 * score]]} | changes


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_a_command_with_flags_and_sources_that_exist(row):
    script, *flags = row.command(3)
    assert flags[-2:] == ["--seed", "3"]
    if row.trainer:
        assert script == "benchmarks/tuned_sb3.py" and flags[0] in ("cartpole", "lander")
    else:
        assert script == "train_distributed.py" and parse_training(flags)
    assert [other.name for other in ROWS].count(row.name) == 1
    assert {figure["source"] for figure in row.published} <= SOURCES.keys()


def test_a_curve_has_windows_of_enough_steps_and_only_those_with_episodes():
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
    curve = task_table.curve_of(metrics, steps=50 * 16_384)
    assert curve == [(20_000, 0.25), (60_000, pytest.approx(0.4))]
    assert task_table.end_of(metrics) == pytest.approx(11.2 / 16)  # fewer than 100 episodes
    assert task_table.end_of([*metrics, metrics[-1] | {"episode/count": 200}]) == 1.0
    assert task_table.end_of(metrics[2:3]) is None


def test_the_peak_is_that_of_the_mean_curve():
    row = ROWS[0]
    curves = [[[1, 0.0], [2, 8.0]], [[1, 6.0], [2, 0.0]]]
    results = [result_of(row, seed, 1.0, curve=curve) for seed, curve in enumerate(curves)]
    figures = task_table.figures_of(results)
    assert figures["peak"][0] == pytest.approx(4.0)  # the mean of both peaks is 7
    assert figures["return"] == (1.0, 0.0)
    assert "peak" not in task_table.figures_of([result_of(row, 1, 1.0, curve=[])])


def store(path, results):
    path.write_text("".join(json.dumps(result) + "\n" for result in results))


def test_results_of_another_command_preset_setting_seed_or_device_do_not_count(tmp_path):
    row = ROWS[0]
    settings = task_table.settings_of(row.preset)
    results = [
        result_of(row, 1, 0.5),
        result_of(row, 2, 0.2, settings=settings | {"gamma": 0.5}),
        result_of(row, 3, 0.9, command=row.command(3) + ["--gamma", "0"]),
        result_of(row, 4, 0.4, preset="massive"),
        result_of(row, 5, 0.1, device="cuda", command=row.command(5, "cuda")),
        result_of(row, 6, 0.3),
    ]
    store(tmp_path / "results", results)

    def found(*choice):
        stored = task_table.read_results(ROWS, tmp_path / "results", *choice)
        return [result["seed"] for result in stored[row.name]]

    assert found() == [1] and found((6, 1)) == [1, 6] and found((5,), "cuda") == [5]


def test_the_page_shows_means_intervals_and_notes(tmp_path, capsys):
    row = next(row for row in ROWS if row.published and row.note)
    best = max(figure["value"] for figure in row.published)
    path, picture = tmp_path / "results", tmp_path / "tasks.png"
    store(path, [result_of(row, seed, (0.4 + 0.1 * seed) * best) for seed in (1, 2, 3)])
    task_table.main(["--print_only", "--results", str(path), "--pictures", str(tmp_path)])
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(lines) == 3, "the table must not show rows without results"
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells[0] == row.task and cells[2].startswith("3: ") and cells[-1] == "1.5"
    # 4.303 * 0.1 / sqrt(3) = 0.248
    low, high = (float(text.replace(",", "")) for text in cells[3].split("[")[1][:-1].split(","))
    assert (low, high) == pytest.approx((0.352 * best, 0.848 * best), rel=0.01)
    assert cells[5] == f"{1.2 * best:.0f}"  # peak
    assert f"- **{row.name}**: {row.note}." in printed
    assert picture.stat().st_size > 1000


def test_a_training_that_fails_is_reported_after_the_others(tmp_path, monkeypatch, capsys):
    rows = [replace(ROWS[0], flags="--no_such_flag 1"), replace(ROWS[0], steps=256)]
    monkeypatch.setattr(task_table, "read_rows", lambda: (rows, SOURCES))
    flags = ["--seeds", "1", "--out", str(tmp_path), "--results", str(tmp_path / "new" / "results")]
    with pytest.raises(SystemExit, match="seed 1: .* exit code 2"):
        task_table.main(flags)
    assert "| CartPole-v1 | 256 | 1: " in capsys.readouterr().out
    for wrong in (("--rows", "no such row"), ("--jobs", "0")):
        with pytest.raises(SystemExit, match="2"):
            task_table.main([*flags, *wrong])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["CartPole without velocities"])
def test_rows_of_both_trainers_are_trained_once_and_drawn(task, tmp_path, monkeypatch, capsys):
    rows = [replace(row, steps=2048) for row in ROWS if row.task == task]
    monkeypatch.setattr(task_table, "read_rows", lambda: (rows, SOURCES))
    flags = ["--seeds", "1", "2", "--out", str(tmp_path), "--results", str(tmp_path / "results")]
    for number_of_runs in (4, 0):
        task_table.main([*flags, "--pictures", str(tmp_path)])
        printed = capsys.readouterr().out
        assert len(re.findall("^python ", printed, re.M)) == number_of_runs
    assert "| CartPole without velocities, by stable-baselines3 | 2,048 | 2: " in printed
    assert (tmp_path / "seconds.png").stat().st_size > 1000


def test_every_low_row_of_the_stored_results_has_a_note():
    """A row is low if it is more than 10 % below a published figure after as many steps."""
    results = task_table.read_results(ROWS, task_table.RESULTS)
    low = set()
    for row in ROWS:
        ours = task_table.figures_of(results[row.name])
        for figure in row.published:
            name = figure.get("compare", SOURCES[figure["source"]]["compare"])
            is_comparable = name in ours and figure.get("steps", 0) <= row.steps
            if is_comparable and ours[name][0] < figure["value"] - 0.1 * abs(figure["value"]):
                low.add(row.name)
    assert low <= {row.name for row in ROWS if row.note}
