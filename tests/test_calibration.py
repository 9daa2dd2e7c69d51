"""Calibration and the speedup command: from flags or a run directory to predictions."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from agents_ranks import make_job, world_of_one

from agents.trainer import Training, train
from rl_dist import reduction_bench, speedup
from rl_dist.calibration import (
    SMALL_COLLECTIVES,
    Calibration,
    Point,
    flags_of_run,
    modelled_communication,
    share_flags,
    steps_per_episode,
)
from rl_dist.launch import UserError
from rl_dist.machines import LINKS
from rl_dist.metrics import NullWriter
from rl_dist.reduction_bench import measure_reductions
from rl_dist.scaling_model import Communication, Work
from rl_dist.speedup_report import COLUMNS, Budget, duration, markdown, report_of, table
from rl_dist.world import StopFlag

TINY = ["--env", "Recall-v0", "--num_envs", "4", "--num_steps", "16", "--bptt_steps", "8", "--batch_size", "4"]
TINY += ["--hidden_size", "8"]
WORK = Work(env_steps=1000, gradient_steps=10, collect_s=1.0, forward_s=0.3, backward_s=0.6, optimizer_s=0.1)


# ---- shares and flags


def test_a_ranks_share_has_the_totals_divided_or_the_same():
    assert share_flags(64, 128, 2, "strong") == (["--num_envs=32", "--batch_size=64"], "")
    assert share_flags(64, 128, 2, "weak") == (["--num_envs=64"], "")
    flags, problem = share_flags(64, 128, 3, "strong")
    assert not flags and "do not divide over 3 ranks" in problem and "--scaling weak" in problem


def write_run(folder, config, records=()):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"torn')
    return folder


CONFIG = {
    "launch": {"num_gpus": 2, "on_event": ""},
    "train": {"num_envs": 0, "normalize_obs": True},
    "ppo": {"target_kl": None},
    "task": {"env": "Recall-v0", "env_kwargs": ""},
    "data": {"data": "simulated"},
    "market": {"num_worlds": 4},
    "trading": {"fee_bps": 10.0},
}


def test_flags_of_a_run_leave_out_what_cannot_take_effect(tmp_path):
    flags = flags_of_run(write_run(tmp_path / "gym", CONFIG))
    assert flags == ["--num_gpus=2", "--num_envs=0", "--normalize_obs=True", "--target_kl=none", "--env=Recall-v0"]
    trading = CONFIG | {"task": {"env": "StockTrading-v0", "vectorization": "auto"}, "data": {"data": "prices.csv"}}
    flags = flags_of_run(write_run(tmp_path / "trading", trading))
    assert flags[-3:] == ["--env=StockTrading-v0", "--data=prices.csv", "--fee_bps=10.0"]


def test_a_folder_that_is_no_run_is_told(tmp_path):
    with pytest.raises(UserError, match="is no run directory"):
        flags_of_run(tmp_path)


def test_steps_per_episode():
    records = [{"episode/count": 2, "global_step": 100 * n, "iteration": n} for n in (3, 4)]
    assert steps_per_episode(records) == 50.0
    assert math.isnan(steps_per_episode([records[0] | {"episode/count": 0}]))


# ---- what ranks say to each other


def test_training_makes_as_many_small_collectives_as_are_measured(tmp_path):
    """Besides a reduction for each gradient step, which announces itself as well."""
    job = make_job("recall, clstm", tmp_path, iterations=3, dtype=torch.float32)
    job = replace(job, train=replace(job.train, sync_check_every=0, checkpoint_every=100, keep_best="off"))
    calls = []
    with world_of_one() as world:

        class Counting(NullWriter):
            def write(self, record, *, done):
                calls.append(world.doing.calls)

        train(Training(job, world), Counting(), StopFlag())
    assert calls[1] - calls[0] == SMALL_COLLECTIVES
    assert SMALL_COLLECTIVES == reduction_bench.SUMS + reduction_bench.AGREEMENTS + 2 * reduction_bench.GATHERS


@pytest.fixture(scope="module")
def reductions():
    return measure_reductions(2, [4096, 2**20], repeats=8)


def test_reductions_are_measured_between_ranks(reductions):
    assert reductions.ranks == 2 and set(reductions.gradients_s) == {4096, 2**20}
    assert all(1e-6 < seconds < 5.0 for seconds in (*reductions.gradients_s.values(), reductions.small_s))


def test_modelled_communication_grows_with_ranks_and_machines():
    def cost(ranks):
        return modelled_communication(2**20, ranks, 8, LINKS["NVLink 4"], LINKS["InfiniBand NDR"])

    assert cost(1) == Communication() and cost(2).gradient_s < cost(8).gradient_s < cost(16).gradient_s
    assert cost(8).small_s == pytest.approx(SMALL_COLLECTIVES * LINKS["NVLink 4"].all_reduce_s(64, 8))


# ---- reports


def calibration_of(*points):
    return Calibration(
        flags=[],
        device_type="cpu",
        ranks_per_machine=2,
        link=LINKS["loopback"],
        between=LINKS["loopback"],
        gradient_bytes=10**6,
        num_envs=64,
        batch_size=128,
        steps_per_episode=50.0,
        one=points[0],
        points=list(points),
    )


ONE = Point(ranks=1, scaling="strong", work=WORK)
TWO = Point(ranks=2, scaling="weak", work=WORK, communication=Communication(gradient_s=0.05))
THREE = Point(ranks=3, scaling="strong", problem="num_envs 64 does not divide")
BUDGET = Budget(num_episodes=7200, steps_per_episode=50.0, price_per_hour=2.0)


def test_rows_hold_speedup_time_and_cost():
    one, two, three = report_of(calibration_of(ONE, TWO, THREE), BUDGET, [], {2: 750.0}).rows
    assert (one["speedup"], one["efficiency"]) == (1.0, 1.0)
    assert two["steps_per_s"] == pytest.approx(2000 / 2.5) and two["speedup"] == pytest.approx(1.6)
    assert two["efficiency"] == pytest.approx(0.8) and two["shares"]["communication"] == pytest.approx(0.2)
    assert one["hours"] == pytest.approx(360_000 / 500 / 3600) and one["cost"] == pytest.approx([0.4, 0.4])
    assert two["hours"] == pytest.approx(360_000 / 800 / 3600)
    assert two["cost"] == pytest.approx([2 * 2.0 * two["hours"]] * 2) and two["measured_steps_per_s"] == 750.0
    assert three["problem"] and "speedup" not in three


def test_electricity_is_a_way_to_pay_and_no_price_is_none():
    powered = Budget(num_episodes=7200, steps_per_episode=50.0, power_watts=500.0, power_price=0.3)
    row = report_of(calibration_of(ONE), powered, [], {}).rows[0]
    assert row["cost"] == pytest.approx([0.5 * 0.3 * row["hours"]] * 2)
    unpriced = Budget(num_episodes=7200, steps_per_episode=50.0)
    assert report_of(calibration_of(ONE), unpriced, [], {}).rows[0]["cost"] is None
    endless = report_of(calibration_of(ONE), Budget(num_episodes=1), [], {})
    assert endless.rows[0]["hours"] is None and "no episode ended" in table(endless)


def test_cards_one_does_not_own_are_marked_and_unequal_ones_go_at_the_slowest():
    cards = [speedup.find_gpus("A100"), speedup.find_gpus("A100 + H100 SXM"), speedup.find_gpus("H100 SXM")]
    report = report_of(calibration_of(ONE, TWO), Budget(num_episodes=7200, steps_per_episode=50.0), cards, {})
    rows = {row["machine"]: row for row in report.rows if row["gpus"] == 2}
    assert set(rows) == {"this machine", "A100", "A100 + H100 SXM", "H100 SXM"}
    assert [row["estimate"] for row in rows.values()] == [False, True, True, True]
    assert rows["A100"]["steps_per_s"] == pytest.approx(rows["A100 + H100 SXM"]["steps_per_s"])
    assert rows["H100 SXM"]["steps_per_s"] > rows["A100"]["steps_per_s"]
    assert rows["A100 + H100 SXM"]["cost"][0] > rows["A100"]["cost"][0]
    assert "estimate" in table(report) and report.notes


def test_table_and_markdown_hold_every_column_and_remark():
    report = report_of(calibration_of(ONE, TWO, THREE), BUDGET, [], {2: 750.0})
    text, marked = table(report), markdown(report)
    for part in (*COLUMNS, "1.60x", "80%", "800", "cannot be, num_envs 64", "itself measured 750 steps/s"):
        assert part in text and part in marked
    assert "| 2 | weak | 2x | 1.60x" in marked
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2e-6, "2 us"), (0.0251, "25.1 ms"), (59, "59 s"), (600, "10 min"), (7200, "2 h"), (864_000, "10 days")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


# ---- the command


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--gpus", "0"], "--gpus must be 1..100000, got 0"),
        (["--gpus", "two"], "invalid int value: 'two'"),
        (["--gpu", "H1000"], "--gpu: 'H1000' is not known; there are A100"),
        (["--link", "string"], "'string' is not known; there are NVLink 3"),
        (["--power_watts", "300"], "--power_watts and --power_price go together"),
        (["--power_watts", "1", "--power_price", "1", "--price_per_hour", "1"], "leave one out"),
        (["--price_per_hour", "-1"], "--price_per_hour must be a number from 0, got -1.0"),
        (["--iterations", "0"], "--iterations must be at least 1, got 0"),
        (["--resume", "runs/x"], "--resume does nothing here"),
        (["--gpus", "4", "--gpus_per_machine", "2"], "--between: 4 GPUs are 2 machines of 2; name the network"),
        (["nowhere"], "nowhere is no run directory"),
        (["--device", "cuda"], "torch sees no CUDA GPU"),
    ],
)
def test_bad_usage_is_one_line(argv, told, capsys):
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert speedup.main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("error: ") and told in err


def test_flags_that_training_refuses_are_told_in_its_words(capsys):
    assert speedup.main([*TINY, "--hidden_size", "none"]) == 2
    assert "hidden_size" in capsys.readouterr().err.splitlines()[-1]


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as leaving:
        speedup.main(["--help"])
    assert leaving.value.code == 0
    assert "examples:" in capsys.readouterr().out


@pytest.fixture(scope="module")
def report_folder(tmp_path_factory):
    """The command on a tiny job, for one and two ranks, weak: short runs and reductions, all real."""
    folder = tmp_path_factory.mktemp("speedup")
    argv = [*TINY, "--gpus", "2", "--scaling", "weak", "--iterations", "3", "--num_episodes", "1000"]
    argv += ["--price_per_hour", "1", "--gpu", "H100 SXM", "--out", str(folder)]
    saved, sys.stdout = sys.stdout, open(folder / "stdout", "w")  # noqa: SIM115
    try:
        code = speedup.main(argv)
    finally:
        sys.stdout.close()
        sys.stdout = saved
    assert code == 0
    return folder


def test_the_command_measures_and_writes_everything(report_folder):
    report = json.loads((report_folder / "speedup.json").read_text())
    here = [row for row in report["rows"] if row["machine"] == "this machine"]
    assert [row["gpus"] for row in here] == [1, 2] and [row["copies"] for row in here] == [1, 2]
    for row in here:
        assert row["steps_per_s"] > 0 and row["hours"] > 0 and row["cost"][0] > 0
        assert row["env_steps"] == 64 * row["gpus"]
        assert sum(row["shares"].values()) == pytest.approx(1.0)
    assert report["calibration"]["gradient_bytes"] > 1000 and report["calibration"]["link"]["name"] == "measured"
    assert "H100 SXM, an estimate" in (report_folder / "stdout").read_text()
    pictures = {"time", "speedup", "efficiency", "time_split", "utilisation"}
    assert {path.stem for path in report_folder.glob("*.png")} == pictures
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in Path(report_folder).glob("*.png"))
