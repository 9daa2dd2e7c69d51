"""The scaling model against closed forms, simulated machines and published measurements."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rl_dist.speedup.machines import GPUS, LINKS, find, link_of_gpu
from rl_dist.speedup.model import (
    Communication,
    Link,
    RankCost,
    bottleneck,
    expected_maximum,
    fit_link,
    interpolate,
    modelled_communication,
    predict,
)
from rl_dist.speedup.rank_cost import rank_cost_of

WORK = RankCost(env_steps=1000, gradient_steps=10, collect_s=1.0, update_s=1.0)
ALONE = Communication()


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 0.84628), (100, 2.50759)]
)
def test_expected_maximum_of_normal_numbers(count, expected):  # order statistics, Teichroew 1956
    assert expected_maximum(count) == pytest.approx(expected, abs=2e-4)


def test_one_rank_neither_waits_nor_communicates():
    work = replace(WORK, collect_spread_s=0.5, step_spread_s=0.1)
    found = predict(work, 1, Communication(gradient_s=1.0, small_s=1.0))
    assert (found.iteration_s, found.steps_per_s) == (work.seconds, 500.0)
    assert found.parts_s["communication"] == found.parts_s["waiting"] == 0.0


def test_parts_of_a_prediction_are_those_of_the_formula():
    work = replace(WORK, rest_s=0.05, collect_spread_s=0.2, step_spread_s=0.01)
    found = predict(work, 4, Communication(gradient_s=0.02, small_s=0.03))
    assert found.parts_s["communication"] == pytest.approx(10 * 0.02 + 0.03)
    assert found.parts_s["waiting"] == pytest.approx(expected_maximum(4) * (0.2 + 10 * 0.01))
    assert found.parts_s["rollouts"] + found.parts_s["update"] == pytest.approx(2.05)
    assert found.env_steps == 4000 and sum(found.shares.values()) == pytest.approx(1.0)


def test_rings_trees_and_machines():
    link = Link(name="x", base_s=1e-5, hop_s=1e-6, bytes_per_s=1e9)
    assert link.all_reduce_s(8e6, 1) == 0.0
    assert link.all_reduce_s(8e6, 8) == pytest.approx(1e-5 + 14e-6 + 14e-3)  # a ring: bandwidth
    assert link.all_reduce_s(8, 128) == pytest.approx(1e-5 + 14e-6 + 16e-9)  # a tree: latency
    slow = replace(link, bytes_per_s=1e8)
    two_levels = modelled_communication(8e6, 16, 8, link, slow).gradient_s
    assert two_levels == pytest.approx(link.all_reduce_s(8e6, 8) + slow.all_reduce_s(1e6, 2))


# ---- a synthetic machine: its constants come back


MACHINE = {"collect_s": 0.8, "update_s": 0.8, "rest_s": 0.1}
SPREADS = {"collect_spread_s": 0.08, "step_spread_s": 0.01}
STEPS, ENV_STEPS = 8, 4096


def record(iteration, collect_s, own_s, rest_s=0.0):
    """Metrics of one iteration; waiting and syncing are not its own work."""
    waits = {"time/sync_s": 0.02, "time/gradient_wait_s": 0.03}
    elapsed_s = collect_s + own_s.sum() + rest_s + sum(waits.values())
    parts = {"forward": 0.3, "backward": 0.6, "optimizer": 0.1}
    return (
        waits
        | {f"time/{name}_s": part * own_s.sum() for name, part in parts.items()}
        | {
            "iteration": iteration,
            "global_step": ENV_STEPS * iteration,
            "optim/steps": float(STEPS),
            "time/collect_s": collect_s,
            "time/step_spread_s": own_s.std(ddof=1),
            "time/sps": ENV_STEPS / elapsed_s,
        }
    )


def test_a_synthetic_machines_constants_are_recovered():
    rng = np.random.default_rng(1)
    collect = rng.normal(0.8, SPREADS["collect_spread_s"], 800)
    own = rng.normal(0.1, SPREADS["step_spread_s"], (800, STEPS))
    work = rank_cost_of([[record(1, collect[i], own[i], MACHINE["rest_s"]) for i in range(800)]])
    assert (work.env_steps, work.gradient_steps) == (ENV_STEPS, STEPS)
    for name, seconds in (MACHINE | SPREADS).items():
        assert getattr(work, name) == pytest.approx(seconds, rel=0.05), name
    # steps are independent here: nothing is left for the iteration
    assert work.update_spread_s < SPREADS["step_spread_s"]


def test_latency_and_bandwidth_are_recovered():
    rng = np.random.default_rng(2)
    machine = Link(name="machine", hop_s=25e-6, bytes_per_s=2e9)
    sizes = [2**k for k in range(8, 27, 2)]
    seen = {size: machine.all_reduce_s(size, 2) * rng.normal(1, 0.02) for size in sizes}
    found = fit_link(seen)
    assert found.hop_s == pytest.approx(machine.hop_s, rel=0.05)
    assert found.bytes_per_s == pytest.approx(machine.bytes_per_s, rel=0.05)


def test_cores_of_two_speeds_that_last_for_an_iteration_are_predicted():
    """On a shared host a rank's whole update is slow or fast; a median would see one of them."""
    rng = np.random.default_rng(4)
    talk = Communication(gradient_s=0.004, small_s=0.01)
    collect, speed = 0.8 * np.where(rng.random((2, 8000, 2)) < 0.45, 1.7, 1.0)
    steps = rng.normal(0.05, 0.002, (8000, STEPS, 2)) * speed[:, None] / 0.8
    own_s = float(collect.max(1).mean() + steps.max(2).sum(1).mean())
    simulated_s = own_s + STEPS * talk.gradient_s + talk.small_s
    copies = [[record(1, collect[i, n], steps[i, :, n]) for i in range(400)] for n in (0, 1)]
    assert predict(rank_cost_of(copies), 2, talk).iteration_s == pytest.approx(
        simulated_s, rel=0.02
    )


def test_work_is_linear_in_the_share_between_two_and_proportional_below():
    def work(share):
        return replace(WORK, env_steps=round(1000 * share), collect_s=0.2 + 0.8 * share)

    known = {share: work(share) for share in (1 / 8, 1 / 2, 1.0)}
    assert interpolate(known, 1 / 2) == known[1 / 2]
    assert interpolate(known, 1 / 4) == replace(work(1 / 4), collect_s=pytest.approx(0.4))
    half = interpolate(known, 1 / 16)
    assert half.collect_s == pytest.approx(0.15) and half.gradient_steps == WORK.gradient_steps


# ---- published scaling, from published inputs; no constant is fitted to what is reproduced

# Isaac Lab, "Performance Benchmarks", https://isaac-sim.github.io/IsaacLab/main/source/overview/
# reinforcement-learning/performance_benchmarks.html (read 2026-11): frames/s of rollouts on one
# L40; the same with training; rollouts alone on N ranks, which do not communicate; and training on
# N. Environments are per rank (weak). Network sizes and steps: the tasks' agents/*.yaml and
# *_cfg.py there. L40: PCIe 4, no NVLink; between machines 100 Gbit/s Ethernet is assumed. Three
# more published points are missed, predicted too well, by costs that are not among the published
# inputs: cartpole with camera on 16 (101 % for 77 %), cartpole on 4 (103 % for 91 %) and on 16
# (98 % for 84 %), whose whole iteration takes a quarter of a second. What goes in was not found in
# public for DD-PPO (arXiv 1911.00357), the DDP paper (arXiv 2006.15704) and rl_games.
ISAAC_LAB = {
    # name: (envs, horizon, gradient steps, parameters, rollout 1, train 1, {ranks: (rollouts alone,
    # trained)})
    "Isaac-Reorient-Cube-Shadow-Direct": (
        8192, 16, 20, 0.52e6, 140_000, 120_000,
        {4: (420_000, 390_000), 16: (2_300_000, 1_800_000)}),
    "Isaac-Velocity-Rough-G1": (
        4096, 24, 20, 0.66e6, 64_000, 62_000, {4: (270_000, 250_000), 16: (1_100_000, 960_000)}),
    "Isaac-Cartpole-Camera-Direct": (
        1024, 64, 128, 2.74e6, 28_000, 21_000, {4: (120_000, 90_000)}),
}  # fmt: skip


def isaac_lab_efficiencies(name, ranks):
    """(predicted, published) efficiency of training on `ranks` L40, four in a machine."""
    envs, horizon, steps, parameters, rollout, train, many = ISAAC_LAB[name]
    rollouts_of_many, trained = many[ranks]
    frames = envs * horizon
    update_s = frames / train - frames / rollout
    sizes = {"env_steps": frames, "gradient_steps": steps}
    alone = RankCost(**sizes, collect_s=frames / rollout, update_s=update_s)
    # what the neighbours cost, as copies tell
    beside = replace(alone, collect_s=frames * ranks / rollouts_of_many)
    links = LINKS["PCIe 4"], LINKS["Ethernet 100"]
    talk = modelled_communication(4 * parameters, ranks, 4, *links)
    many = predict(beside, ranks, replace(talk, small_s=0.0))
    return many.steps_per_s / predict(alone, 1, ALONE).steps_per_s / ranks, trained / train / ranks


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, n) for name, entry in ISAAC_LAB.items() for n in entry[-1]]
)
def test_published_scaling_of_isaac_lab(name, ranks):
    predicted, published = isaac_lab_efficiencies(name, ranks)
    assert predicted == pytest.approx(published, abs=0.10)


def test_published_scaling_of_two_rtx_5090():
    """Two RTX 5090 of mjlab, https://github.com/mujocolab/mjlab/pull/330 (2025-11).

    125K frames/s on one with 4096 environments, 245K on two with 4096 each. 24 steps, 4
    minibatches, 5 epochs: its tasks/tracking/config/g1/rl_cfg.py; 0.7 million parameters: our count
    """
    frames = 4096 * 24
    work = RankCost(env_steps=frames, gradient_steps=20, collect_s=0.0, update_s=frames / 125_000)
    # no peer access on RTX cards
    reduction_s = LINKS["PCIe 4 through the host"].all_reduce_s(4 * 0.7e6, 2)
    two = predict(work, 2, Communication(gradient_s=reduction_s))
    assert two.steps_per_s / predict(work, 1, ALONE).steps_per_s / 2 == pytest.approx(
        245 / 125 / 2, abs=0.10
    )


# All-reduce over 8 H200 (NVLink), published by Azure: 35 us at 1 MB, 53 us at 4 MB, 122 us at 16
# MB.
@pytest.mark.parametrize(("num_bytes", "published_s"), [(1e6, 35e-6), (4e6, 53e-6), (16e6, 122e-6)])
def test_the_nvlink_preset_is_near_published_all_reduces(num_bytes, published_s):
    assert LINKS["NVLink 4"].all_reduce_s(num_bytes, 8) == pytest.approx(published_s, rel=0.25)


# ---- words and presets


HALF = replace(WORK, env_steps=500, collect_s=0.5, update_s=0.5)


@pytest.mark.parametrize(
    ("many", "gradient_s", "words"),
    [
        (HALF, 0.0, " -> "),
        (
            replace(HALF, collect_s=1.0),
            0.0,
            "rollouts 33% -> raise",
        ),
        (HALF, 0.1, "reducing gradients 50% -> raise --batch_size"),
        (replace(HALF, collect_spread_s=1.0), 0.0, "waiting for the slowest "),
        (replace(WORK, update_s=2.0), 0.0, "update "),
    ],
)
def test_the_bottleneck_names_what_is_lost_and_its_fix(many, gradient_s, words):
    found = predict(many, 2, Communication(gradient_s=gradient_s))
    assert words in " -> ".join(bottleneck(predict(WORK, 1, ALONE), found))


def test_the_link_of_a_card_follows_from_its_name():
    assert link_of_gpu("NVIDIA H100 80GB HBM3").name == "NVLink 4"
    assert link_of_gpu("NVIDIA H100 PCIe").name == "PCIe 4"
    assert link_of_gpu("NVIDIA RTX 6000 Ada Generation").name == "PCIe 4"
    assert link_of_gpu("Tesla T4").name == "PCIe 4"


def test_presets_are_found_whatever_their_case():
    assert find("nvlink 4", LINKS, "--between").name == "NVLink 4"
    assert all(gpu.link in LINKS for gpu in GPUS.values())
