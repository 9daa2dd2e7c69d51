"""Pictures that hold many machines can still be read."""

import itertools

import matplotlib.pyplot as plt

from rl_dist.speedup_plots import plot_speedup, plot_split

MACHINES = ("this machine", "RTX 6000 Ada", "A100 + H100 SXM", "H200 + B200")
SHARES = {"rollouts": 0.5, "update": 0.3, "communication": 0.1, "waiting": 0.1}


def row(machine, scaling, gpus):
    """As rl_dist.speedup_report makes it, what is drawn of it."""
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
