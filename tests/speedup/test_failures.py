"""Failures of many machines against a simulation and against published jobs."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from rl_dist.errors import UserError
from rl_dist.speedup.command import estimate_training_speedup, parse
from rl_dist.speedup.failures import (
    DAY_S,
    Failures,
    add_failures,
    best_interval_s,
    checkpoint_seconds,
    useful_share,
)
from rl_dist.speedup.machines import LINKS
from rl_dist.speedup.model import (
    Communication,
    Link,
    RankCost,
    modelled_communication,
    predict,
)
from rl_dist.speedup.plots import plot_nodes
from rl_dist.speedup.report import SpeedupReport, node_table

HOUR_S = 3600.0


def simulated_share(interval_s, checkpoint_s, restart_s, mtbf_s, intervals=20_000):
    """Work through so many intervals, with failures at random; every try that fails is lost."""
    rng = np.random.default_rng(1)
    clock_s, failure_s = 0.0, rng.exponential(mtbf_s)
    for _ in range(intervals):
        end_s = clock_s + interval_s + checkpoint_s
        while failure_s < end_s:
            clock_s = failure_s + restart_s
            while (failure_s := failure_s + rng.exponential(mtbf_s)) < clock_s:
                clock_s = failure_s + restart_s  # during the restart
            end_s = clock_s + interval_s + checkpoint_s
        clock_s = end_s
    return intervals * interval_s / clock_s


@pytest.mark.parametrize(
    "costs", [(600, 5, 60, HOUR_S), (60, 20, 30, 300), (1800, 1, 600, 2 * HOUR_S)]
)
def test_the_useful_share_is_that_of_simulated_failures(costs):
    assert useful_share(*costs) == pytest.approx(simulated_share(*costs), rel=0.02)


def test_the_best_interval_wastes_least_and_is_youngs_where_failures_are_rare():
    for checkpoint_s, mtbf_s in ((1.0, HOUR_S), (30.0, HOUR_S), (60.0, 600.0)):
        best_s = best_interval_s(checkpoint_s, mtbf_s)
        shares = [
            useful_share(best_s * factor, checkpoint_s, 60.0, mtbf_s) for factor in (0.8, 1.0, 1.25)
        ]
        assert shares[1] == max(shares)
    assert best_interval_s(1.0, 1e8) == pytest.approx((2 * 1.0 * 1e8) ** 0.5, rel=1e-3)
    assert best_interval_s(3.0, 1.0) == 1.0 and useful_share(1.0, 3e3, 0.0, 1.0) == 0.0


# ---- published figures; nothing is fitted to them but the first, the rate itself


@pytest.mark.parametrize(("gpus", "published_h"), [(16_384, 1.8), (131_072, 0.23)])
def test_the_time_between_failures_is_that_of_kokolis_2024(gpus, published_h):
    """https://arxiv.org/abs/2410.21680, for its larger cluster; machines of eight A100."""
    assert Failures().mtbf_s(gpus // 8) == pytest.approx(published_h * HOUR_S, rel=0.05)


def test_the_failures_of_llama_3_are_predicted_within_a_factor_of_two():
    """419 unexpected interruptions in 54 days of 16,384 H100, https://arxiv.org/abs/2407.21783."""
    predicted = 54 * DAY_S / Failures().mtbf_s(16_384 // 8)
    assert 419 < predicted < 2 * 419


def test_256_gpus_train_resnet_50_as_efficiently_as_published():
    """About 90 % from 8 to 256 P100, Goyal et al., https://arxiv.org/abs/1706.02677.

    29 hours on one machine of eight, for 90 epochs of 1.28 million images in batches of 256
    (https://developer.nvidia.com/blog/facebook-trains-imagenet-in-1-hour); 25.6 million parameters;
    50 Gbit/s Ethernet for each machine. Caffe2 reduces during the backward pass, the model after.
    """
    machine = RankCost(
        env_steps=256, gradient_steps=1, collect_s=0.0, update_s=29 * HOUR_S * 256 / 90 / 1.28e6
    )
    ethernet = Link(name="", base_s=3e-5, hop_s=3e-5, bytes_per_s=0.8 * 6.25e9, shared=True)
    # what a machine does inside is in its 29 hours
    inside = Link(name="free")
    found = modelled_communication(4 * 25.6e6, 256, 8, inside, ethernet)
    many = predict(machine, 32, Communication(gradient_s=found.gradient_s))
    assert many.steps_per_s / predict(machine, 1, Communication()).steps_per_s / 32 == (
        pytest.approx(0.90, abs=0.10)
    )


# ---- the report


def rows_of(scaling="weak", machine="this machine"):
    """A report's rows of a job that scales as its own shares say."""
    work = RankCost(
        env_steps=8192, gradient_steps=20, collect_s=0.5, update_s=0.5, collect_spread_s=0.02
    )
    one = predict(work, 1, Communication())
    rows = []
    for gpus in (8, 64, 1024):
        talk = modelled_communication(2e6, gpus, 8, LINKS["NVLink 4"], LINKS["InfiniBand NDR"])
        found = vars(predict(work, gpus, talk))
        speedup = found["steps_per_s"] / one.steps_per_s
        rows.append(
            found
            | {"gpus": gpus, "machine": machine, "scaling": scaling, "problem": None}
            | {"speedup": speedup, "efficiency": speedup / gpus}
        )
    return rows


def test_rows_gain_machines_and_what_lasts_of_their_speedup(tmp_path, monkeypatch):
    rows = [*rows_of(), {"problem": "does not divide", "machine": "this machine", "gpus": 3}]
    failures = Failures(checkpoint_s=2.0)
    add_failures(rows, 8, failures)
    assert [row["nodes"] for row in rows[:3]] == [1, 8, 128] and "nodes" not in rows[3]
    useful = [row["useful"] for row in rows[:3]]
    assert useful == sorted(useful, reverse=True) and 0.98 < useful[-1] < useful[0] < 1.0
    # Young's interval of 2 s and 154 / 128 days
    young_s = (2 * 2.0 * 154 * DAY_S / 128) ** 0.5
    row = rows[2]
    assert row["checkpoint_every"] * row["iteration_s"] == pytest.approx(young_s, rel=0.02)
    assert row["lasting_speedup"] == row["speedup"] * row["useful"]
    report = SpeedupReport("a job", rows, {"failures": vars(failures)}, "")
    assert len(node_table(report).splitlines()) == 2 + 2 + 3 + 2
    assert node_table(SpeedupReport("a job", rows, {}, "")) == ""
    with monkeypatch.context() as patch:
        patch.setattr(plt, "close", lambda figure: None)
        path = plot_nodes(rows[:3], tmp_path / "nodes.png", "a job")
    assert path.read_bytes()[:4] == b"\x89PNG"
    # the shares fill the field, and the curve of efficiency lies below its top
    (field,) = plt.gcf().axes
    tops = [band.get_paths()[0].vertices[:, 1].max() for band in field.collections]
    assert tops == sorted(tops) and tops[-1] == pytest.approx(1.0)
    plt.close("all")


def test_the_size_of_a_machine_must_be_known():
    assert parse(["--nodes", "1", "128", "--node_mtbf_days", "300"])[0].nodes == [1, 128]
    with pytest.raises(UserError, match="--gpus_per_machine, or --gpu"):
        estimate_training_speedup(nodes=[2], device="cpu")


def test_a_checkpoint_is_written_to_be_timed(tmp_path):
    assert 0 < checkpoint_seconds(1000, tmp_path) < 60
    assert not list(tmp_path.iterdir())
    assert Failures().measured(1000).checkpoint_s > 0
    assert Failures(checkpoint_s=9.0).measured(1000).checkpoint_s == 9.0
