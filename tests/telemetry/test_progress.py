"""Test the progress display and the note about runs that do not learn."""

import pytest

from rl_dist.telemetry import progress
from rl_dist.telemetry.progress import Progress, RecentMeans, stalled


def iteration(number, count, mean, **metrics):
    means = {"episode/return": mean, "episode/length": mean}
    return {"iteration": number, "episode/count": count, **means, **metrics}


def means(pairs, method=RecentMeans.add):
    recent = RecentMeans()
    return [method(recent, iteration(1, *pair)).get("episode/return") for pair in pairs]


def test_the_mean_covers_the_last_100_episodes_in_whole_iterations():
    assert means([(0, None), (50, 1.0), (50, 3.0), (100, 7.0)]) == [None, 1.0, 2.0, 7.0]


def test_an_iteration_without_an_end_keeps_the_mean():
    assert means([(10, 4.0), (0, None)]) == [4.0, 4.0]


def test_a_mean_decides_only_once_100_episodes_have_ended():
    assert means([(99, 1.0), (1, 2.0)], RecentMeans.decisive) == [None, 1.01]


def test_a_resumed_run_decides_by_the_episodes_of_its_earlier_records():
    recent = RecentMeans([iteration(1, 99, 1.0)])
    assert recent.decisive(iteration(2, 1, 2.0))["episode/length"] == 1.01


@pytest.mark.parametrize(
    "returns, is_stalled",
    [
        ([-200.0] * 50, True),
        ([0.0, 1.0] * 25, True),
        ([0.0] * 40 + [1.0] * 10, False),
        ([None] * 50, False),
    ],
    ids=["constant", "noise", "rises late", "no episode ended"],
)
def test_half_a_run_is_stalled_if_returns_stay_in_the_range_of_its_first_tenth(returns, is_stalled):
    records = [iteration(n, 0 if r is None else 100, r) for n, r in enumerate(returns, 1)]
    assert bool(stalled(records)) == is_stalled


def test_a_peak_of_few_episodes_does_not_make_a_run_stalled():
    rising = [iteration(n, 100, n / 50) for n in range(50)]
    assert not stalled([iteration(0, 1, 9.0), *rising])


def test_a_validation_is_shown_once(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    display = Progress(10, "steps", 0)
    display.show(iteration(1, 1, 2.0, **{"valid/return": 3.0}), 1)
    display.show(iteration(2, 1, 2.0), 2)
    display.close()
    shown = capsys.readouterr().err.splitlines()
    assert ["valid/return" in line for line in shown] == [True, False]


def test_a_line_shows_the_part_done_the_speed_and_the_time_left(monkeypatch, capsys):
    now_s = 0.0
    monkeypatch.setattr("tqdm.std.time", lambda: now_s)
    display = Progress(200, "steps", 100)
    now_s = 10.0
    display.show(iteration(3, 1, 2.0, **{"time/sps": 1234.0}), 150)
    display.close()
    line = capsys.readouterr().err
    # This process has taken 50 steps in 10 s; 50 steps are left.
    figures = ("time/sps=1,234", "return=2 of 1 episodes")
    for part in ("iteration 3 | 150/200 steps (75%)", *figures, "00:10 left"):
        assert part in line
