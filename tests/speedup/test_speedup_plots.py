"""The picture of many machines can still be read."""

import matplotlib.pyplot as plt
import pytest

from rl_dist.speedup.plots import plot_speedup

MACHINES = ("this machine", "RTX 6000 Ada", "A100", "H100 SXM")


def test_the_ideal_is_straight_names_stand_beside_and_each_machine_has_its_colour(
    tmp_path, monkeypatch
):
    rows = [
        {"machine": machine, "scaling": scaling, "gpus": gpus,
         "speedup": 0.9 * gpus, "efficiency": 0.9, "speedup_interval": [0.8 * gpus, gpus]}
        for machine in MACHINES for scaling in ("strong", "weak") for gpus in (1, 2, 8)
    ]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(plt, "close", lambda figure: None)
        path = plot_speedup(rows, tmp_path / "new" / "speedup.png", "CartPole-v1, 4 environments")
    assert path.read_bytes()[:4] == b"\x89PNG"
    above, below = plt.gcf().axes
    # the ideal goes through every number of ranks
    ideal = next(line for line in above.get_lines() if line.get_label() == "ideal")
    start, end = above.transData.transform(ideal.get_xydata())
    x, y = above.transData.transform((2, 2))
    assert (y - start[1]) / (x - start[0]) == pytest.approx((end - start)[1] / (end - start)[0])
    legend = above.get_legend().get_window_extent()
    assert legend.x0 >= above.get_window_extent().x1 - 1 and legend.x1 <= 9.0 * 110 + 1
    colors = {line.get_label().split(",")[0]: line.get_color() for line in above.get_lines()}
    assert len(set(colors.values())) == len(colors) == 1 + 4  # the ideal, and one of each machine
    plt.close("all")
