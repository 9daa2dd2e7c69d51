"""Pictures that hold many machines can still be read."""

import itertools

import matplotlib.pyplot as plt
import pytest

from rl_dist.speedup.plots import _unit_of_time, plot_report, plot_speedup, plot_split
from rl_dist.speedup.report import Report

MACHINES = ("this machine", "RTX 6000 Ada", "A100 + H100 SXM", "H200 + B200")
SHARES = {"rollouts": 0.5, "update": 0.3, "communication": 0.1, "waiting": 0.1}


def test_the_ideal_goes_through_every_number_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(plt, "close", lambda figure: None)
    plot_speedup([row("this machine", "strong", gpus) for gpus in (1, 2, 8)], tmp_path / "speedup.png")
    axis = plt.gcf().axes[0]
    ideal = next(line for line in axis.get_lines() if line.get_label() == "ideal")
    start, end = axis.transData.transform(ideal.get_xydata())
    x, y = axis.transData.transform((2, 2))
    assert (y - start[1]) / (x - start[0]) == pytest.approx((end[1] - start[1]) / (end[0] - start[0]))
    monkeypatch.undo()
    plt.close("all")


def report(hours, cost):
    """Three numbers of ranks that take so long and cost so much."""
    rows = [
        row("this machine", "strong", gpus)
        | {"problem": None, "unit": "ranks", "efficiency": 0.9, "steps_per_s": 1.0, "speedup_interval": None}
        | {"hours": hours, "hours_interval": [0.9 * hours, 1.1 * hours], "cost": cost}
        for gpus in (1, 2, 4)
    ]
    facts = {"env": "Recall-v0", "num_envs": 4, "hardware": "2 CPU cores", "date": "2026-11-21"}
    return Report(rows, facts, "100 episodes", cost_unit="USD")


@pytest.mark.parametrize(("hours", "unit"), [(100, "days"), (3, "hours"), (0.5, "minutes"), (0.01, "seconds")])
def test_times_have_the_unit_that_suits_them(hours, unit):
    assert _unit_of_time(report(hours, None).rows)[0] == unit


def test_times_are_drawn_in_their_unit_and_titles_tell_job_and_machine(tmp_path, monkeypatch):
    axes = []
    monkeypatch.setattr(plt, "close", lambda figure: axes.append(figure.axes[0]))
    files = plot_report(report(0.5, None), tmp_path)
    assert axes[0].get_ylabel() == "training time, minutes" and axes[0].get_xlabel() == "ranks"
    assert {axis.get_title() for axis in axes} == {"Recall-v0, 4 environments; 2 CPU cores, 2026-11-21"}
    assert len(files) == 5 and all(file.exists() for file in files)
    monkeypatch.undo()
    plt.close("all")


def test_cost_is_drawn_where_there_is_a_price_and_none_is_left_over(tmp_path):
    assert tmp_path / "cost.png" in plot_report(report(1.0, [1.0, 2.0]), tmp_path)
    assert tmp_path / "cost.png" not in plot_report(report(1.0, None), tmp_path)
    assert not (tmp_path / "cost.png").exists()


def row(machine, scaling, gpus):
    """As rl_dist.speedup.report makes it, what is drawn of it."""
    head = {"machine": machine, "estimate": machine != "this machine", "scaling": scaling, "gpus": gpus}
    return head | {"speedup": 0.9 * gpus, "shares": SHARES, "iteration_s": 2.0}


def test_names_in_crowded_pictures_do_not_cover_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(plt, "close", lambda figure: None)
    rows = [row(machine, scaling, gpus) for machine in MACHINES for scaling in ("strong", "weak") for gpus in (1, 2)]
    plot_split(rows, tmp_path / "split.png")
    axis = plt.gcf().axes[0]
    labels = [label for a in (axis, *axis.child_axes) for label in a.get_xticklabels() if label.get_text().strip()]
    assert len(labels) == 16 + 8
    boxes = [label.get_window_extent() for label in labels[16:]]
    assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes))
    plot_speedup(rows, tmp_path / "speedup.png")
    axis = plt.gcf().axes[0]
    assert axis.get_legend().get_window_extent().x0 >= axis.get_window_extent().x1 - 1
    colors = {line.get_label().partition(",")[0].partition(" (")[0]: line.get_color() for line in axis.get_lines()}
    assert len(set(colors.values())) == len(colors) == 1 + 4  # the ideal, and one of each machine
    monkeypatch.undo()
    plt.close("all")
