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
from rl_dist.errors import UserError
from rl_dist.hardware import host_memory
from rl_dist.hardware.host_memory import HostMemory
from rl_dist.launch.short_run import Trial
from rl_dist.process_group.world import StopFlag, threads_per_rank
from rl_dist.speedup import calibration, reduction_bench
from rl_dist.speedup import command as speedup
from rl_dist.speedup.calibration import SMALL_COLLECTIVES, Calibration, Point, modelled_communication, share_flags
from rl_dist.speedup.machines import GPUS, LINKS
from rl_dist.speedup.model import Communication, Link, Work
from rl_dist.speedup.rank_cost import steps_per_episode
from rl_dist.speedup.reduction_bench import Reductions, measure_reductions
from rl_dist.speedup.report import COLUMNS, Budget, duration, markdown, report_of, table
from rl_dist.telemetry.metrics import NullWriter
from rl_dist.telemetry.progress import Stages

TINY = ["--env", "Recall-v0", "--num_envs", "4", "--num_steps", "16", "--bptt_steps", "8", "--batch_size", "4"]
TINY += ["--hidden_size", "8"]
WORK = Work(env_steps=1000, gradient_steps=10, collect_s=1.0, forward_s=0.3, backward_s=0.6, optimizer_s=0.1)


# ---- shares and episodes


def test_a_ranks_share_has_the_totals_divided_or_the_same():
    assert share_flags(64, 128, 2, "strong") == (["--num_envs=32", "--batch_size=64"], "")
    assert share_flags(64, 128, 2, "weak") == (["--num_envs=64"], "")
    flags, problem = share_flags(64, 128, 3, "strong")
    assert not flags and "do not divide over 3 ranks" in problem and "--scaling weak" in problem


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


@pytest.mark.slow
def test_reductions_are_measured_between_ranks(reductions):
    assert reductions.ranks == 2 and set(reductions.gradients_s) == {4096, 2**20}
    assert all(1e-6 < seconds < 5.0 for seconds in (*reductions.gradients_s.values(), reductions.small_s))


def test_modelled_communication_grows_with_ranks_and_machines():
    def cost(ranks):
        return modelled_communication(2**20, ranks, 8, LINKS["NVLink 4"], LINKS["InfiniBand NDR"])

    assert cost(1) == Communication() and cost(2).gradient_s < cost(8).gradient_s < cost(16).gradient_s
    assert cost(8).small_s == pytest.approx(SMALL_COLLECTIVES * LINKS["NVLink 4"].all_reduce_s(64, 8))


# ---- GPUs, with injected facts


def trial_of_any_size(asked, copy_bytes=0):
    """Stands for run_trial on machines larger than this: remembers what was asked, gives plausible records."""

    def run(flags, copies, threads, iterations, *, device_type, on_wait):
        on_wait(0.5)
        asked.append((copies, threads, device_type, [flag for flag in flags if "num_envs" in flag or "batch" in flag]))
        record = {f"time/{name}_s": 0.1 for name in ("collect", "forward", "backward", "optimizer")}
        record |= {"time/sync_s": 0.0, "time/gradient_wait_s": 0.0, "time/step_spread_s": 0.0, "optim/steps": 8.0}
        record |= {"time/sps": 8192 / 0.5, "global_step": 8192, "iteration": 1}
        record |= {"episode/count": 32, "episode/length": 256.0}
        config = {"train": {"num_steps": 128, "batch_size": 128}, "task": {"env": "Recall-v0"}}
        return Trial([[record]] * copies, config, "gradients of 4000000 bytes", copy_bytes)

    return run


def calibrate_gpus(monkeypatch, here, gpus, **options):
    """Calibrate on a machine that has so many H100."""
    asked, reduced = [], []

    def reductions(ranks, sizes, device_type, threads):
        reduced.append((ranks, device_type))
        return Reductions(ranks, {size: 1e-5 + size * 1e-11 for size in sizes}, 1e-4)

    monkeypatch.setattr(calibration, "run_trial", trial_of_any_size(asked))
    monkeypatch.setattr(calibration, "measure_reductions", reductions)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
    stages = Stages(shown=False)
    found = calibration.calibrate([], gpus, scalings=["strong"], device_type="cuda", stages=stages, **options)
    assert stages.number == stages.total == len(asked) + len(reduced)  # measured as planned
    return found, asked, reduced


def test_gpus_that_are_here_are_measured_and_machines_beyond_modelled(monkeypatch):
    found, asked, reduced = calibrate_gpus(monkeypatch, 2, [2, 8], between=LINKS["InfiniBand NDR"])
    assert found.ranks_per_machine == 2 and found.gradient_bytes == 4_000_000
    assert [entry[0] for entry in asked] == [1, 2, 2]  # a full machine of the four
    assert {entry[2] for entry in asked} == {"cuda"} and asked[2][3] == ["--num_envs=8", "--batch_size=16"]
    assert reduced == [(2, "cuda")]
    two, eight = found.points[1:]
    assert two.communication == Communication(gradient_s=pytest.approx(1e-5 + 4e-5), small_s=1e-4)
    assert eight.communication.gradient_s > two.communication.gradient_s + LINKS["InfiniBand NDR"].base_s


def test_one_gpu_stands_for_a_machine_of_eight_by_the_link_of_its_kind(monkeypatch):
    found, asked, reduced = calibrate_gpus(monkeypatch, 1, [8], ranks_per_machine=8)
    assert found.link == LINKS["NVLink 4"] and not reduced
    assert [entry[0] for entry in asked] == [1, 1]
    assert asked[1][1] == max(1, threads_per_rank(8))
    assert found.points[1].communication.gradient_s == LINKS["NVLink 4"].all_reduce_s(4_000_000, 8)


# ---- copies on this machine


def calibrate_copies(monkeypatch, cores, gpus, copy_bytes=0, **options):
    """Calibrate on a CPU machine of so many cores; what was asked of short runs."""
    asked = []
    monkeypatch.setattr(calibration, "run_trial", trial_of_any_size(asked, copy_bytes))
    monkeypatch.setattr(calibration, "available_cores", lambda: cores)
    link, stages = LINKS["loopback"], Stages(shown=False)
    try:
        found = calibration.calibrate([], gpus, device_type="cpu", link=link, stages=stages, **options)
        assert stages.number == stages.total == len(asked)  # measured as planned
        return found, asked
    except UserError as error:
        return str(error), asked


def test_for_cards_each_share_is_measured_once_more_with_nothing_beside_it(monkeypatch):
    found, asked = calibrate_copies(monkeypatch, 2, [2, 4], uncontended=True)
    assert [entry[0] for entry in asked] == [1, 2, 1, 4, 1, 2, 4]  # a weak share is what one rank has
    assert asked[2][1] == asked[4][1] == asked[0][1]  # threads
    assert asked[2][3] == ["--num_envs=32", "--batch_size=64"] and asked[4][3] == ["--num_envs=16", "--batch_size=32"]
    assert [point.alone is None for point in found.points] == [True, False, False] * 2
    assert all(point.alone == found.one.work for point in found.points if point.scaling == "weak" and point.ranks > 1)


def test_without_cards_or_with_one_copy_nothing_is_measured_twice(monkeypatch):
    assert [entry[0] for entry in calibrate_copies(monkeypatch, 2, [2])[1]] == [1, 2, 2]
    machines = {"ranks_per_machine": 1, "between": LINKS["loopback"], "uncontended": True}
    found, asked = calibrate_copies(monkeypatch, 2, [2], **machines)
    assert [entry[0] for entry in asked] == [1, 1, 1] and all(point.alone is None for point in found.points)


def test_what_cannot_be_shared_out_is_not_in_the_plan(monkeypatch):
    found, asked = calibrate_copies(monkeypatch, 2, [2, 3])  # 64 environments
    assert [point.problem != "" for point in found.points] == [False, False, True] + 3 * [False]
    assert [entry[0] for entry in asked] == [1, 2, 2, 3]


def test_far_more_copies_than_cores_are_refused_before_anything_starts(monkeypatch):
    told, asked = calibrate_copies(monkeypatch, 2, [2, 9])
    assert not asked and "--gpus 9: 9 trainings side by side are too many for 2 core(s), at most 8" in told
    assert "--gpus_per_machine 8" in told and "--between NAME" in told
    machines = {"ranks_per_machine": 8, "between": LINKS["loopback"]}
    assert [entry[0] for entry in calibrate_copies(monkeypatch, 2, [2, 9], **machines)[1]] == [1, 2, 2, 8]


def test_more_copies_than_fit_in_memory_are_refused_after_the_first(monkeypatch):
    monkeypatch.setattr(host_memory, "host_memory", lambda: HostMemory(2**36, 2**35))  # a container's share
    half = 2**34
    told, asked = calibrate_copies(monkeypatch, 2, [4], copy_bytes=half)
    assert [entry[0] for entry in asked] == [1]
    assert "4 trainings side by side of about" in told and "do not fit in the" in told and "--between NAME" in told
    _, asked = calibrate_copies(monkeypatch, 2, [4], copy_bytes=half // 10**4)
    assert [entry[0] for entry in asked] == [1, 4, 4]


def test_strong_shares_are_smaller_and_may_fit_where_weak_ones_do_not(monkeypatch):
    monkeypatch.setattr(host_memory, "host_memory", lambda: HostMemory(2**36, 30 * 2**30))
    assert "about 10 GiB each" in calibrate_copies(monkeypatch, 2, [4], copy_bytes=10 * 2**30)[0]
    assert len(calibrate_copies(monkeypatch, 2, [4], copy_bytes=10 * 2**30, scalings=["strong"])[1]) == 2


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
    one, two, three = report_of(calibration_of(ONE, TWO, THREE), BUDGET, [], {(2, "weak"): 750.0}).rows
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


def test_cards_are_estimated_from_a_share_that_nothing_competed_with():
    """Four copies on too few cores are each four times slower, which no card's owner would see."""
    slow, rollouts = replace(WORK, collect_s=4.0), replace(WORK, forward_s=0.0, backward_s=0.0, optimizer_s=0.0)
    one = replace(ONE, work=rollouts)
    four = Point(ranks=4, scaling="weak", work=slow, alone=rollouts, copies=4)
    found = replace(calibration_of(one, four), ranks_per_machine=4, cores=1)
    rows = report_of(found, BUDGET, [speedup.find_gpus("H100 SXM")], {}).rows
    here, card = (row for row in rows if row["gpus"] == 4)
    assert here["speedup"] < 1.0 and here["copies"] == 4
    assert card["speedup"] == pytest.approx(4.0, rel=0.01) and card["copies"] == 1


def test_notes_tell_of_cores_that_copies_shared_and_of_an_assumed_network():
    crowded = replace(calibration_of(ONE, replace(TWO, ranks=16, copies=16)), cores=4, ranks_per_machine=16)
    measured = replace(crowded, link=Link(name="measured"), between=None)
    cards = [speedup.find_gpus("H100 SXM")]
    notes = " ".join(report_of(measured, BUDGET, cards, {}).notes)
    assert "4 core(s), which up to 16 copies shared" in notes
    assert "8 in a machine; between machines InfiniBand NDR is assumed, --between names another" in notes
    named = " ".join(report_of(replace(crowded, between=LINKS["Ethernet 25"]), BUDGET, cards, {}).notes)
    assert "between machines Ethernet 25" in named and "is assumed" not in named
    assert not report_of(calibration_of(ONE, TWO), BUDGET, [], {}).notes


def test_a_busy_machine_is_told_and_one_rank_stands_there_once():
    busy = replace(calibration_of(ONE, TWO, replace(ONE, scaling="weak")), cores=4, load=3.0)
    report = report_of(busy, BUDGET, [], {})
    assert "was busy: 3.0 processes wanted its 4 core(s)" in report.notes[0] and len(report.rows) == 3
    assert [line.split()[:2] for line in table(report).splitlines()[2:4]] == [["1", "-"], ["2", "weak"]]
    assert not report_of(replace(busy, load=1.0), BUDGET, [], {}).notes


def test_times_have_an_interval_and_cures_are_said_once():
    unsure = replace(TWO, work=replace(WORK, relative_error=0.1))
    report = report_of(calibration_of(ONE, unsure, replace(unsure, ranks=4)), BUDGET, [], {})
    text = table(report)
    assert "7.5 min (6.03-8.97)" in text and text.count("-> raise --batch_size for fewer") == 1
    assert "weak: 2 ranks give 1.60x instead of 2x: most is lost reducing gradients (20% of an iteration)\n" in text


def test_on_gpus_they_are_called_so():
    found = replace(calibration_of(ONE, TWO), device_type="cpu")
    cards = report_of(found, BUDGET, [speedup.find_gpus("A100")], {}).rows[-1]
    assert cards["unit"] == "GPUs" and report_of(found, BUDGET, [], {}).rows[-1]["unit"] == "ranks"


def test_a_runs_own_throughput_stands_beside_its_scaling_only():
    both = calibration_of(ONE, replace(TWO, scaling="strong"), TWO)
    rows = report_of(both, BUDGET, [], {(2, "strong"): 700.0}).rows
    assert [row["measured_steps_per_s"] for row in rows] == [None, 700.0, None]


def test_table_and_markdown_hold_every_column_and_remark():
    report = report_of(calibration_of(ONE, TWO, THREE), BUDGET, [], {(2, "weak"): 750.0})
    text, marked = table(report), markdown(report)
    heads = ("ranks", *COLUMNS, "cost (as --price_per_hour)")
    for part in (*heads, "1.60x", "80%", "800", "cannot be, num_envs 64", "itself measured 750 steps/s"):
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
        (["--num_gpus", "banana"], "--num_gpus does nothing here: use --gpus"),
        (["--strategy=none"], "--strategy does nothing here: leave it out"),
        (["--gradient_compression", "bf16"], "--gradient_compression does nothing here: leave it out"),
        (["--lr-scaling", "sqrt"], "--lr_scaling does nothing here: leave it out"),
        (["--env", "Recall-v0", "--seed", "3"], "--seed does nothing here: leave it out"),
        (["--validate_every", "3"], "--validate_every does nothing here: leave it out"),
        (["--checkpoint_every", "3"], "--checkpoint_every does nothing here: leave it out"),
        (["--keep_best", "off"], "--keep_best does nothing here: leave it out"),
        (["--max_restarts", "3"], "--max_restarts does nothing here: leave it out"),
        (["--on_event", "true"], "--on_event does nothing here: leave it out"),
        (["--device", "cpu", "--gpus", "100000"], "--gpus 100000: 100000 trainings side by side are too many"),
        (["--out", __file__], f"--out {__file__} cannot be written: File exists"),
        (["--out", f"{__file__}/folder"], "folder cannot be written: Not a directory"),
        (["--gpus", "4", "--gpus_per_machine", "2"], "--between: 4 GPUs are 2 machines of 2; name the network"),
        (["--link", "NVLink 4", "--gpus", "1"], "--link NVLink 4 does nothing: no machine has two GPUs (ranks)"),
        (["--between", "Ethernet 10"], "--between Ethernet 10 does nothing: 2 GPUs (ranks) are in one machine"),
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


def test_python_callers_give_arguments_instead_of_flags():
    with pytest.raises(UserError, match="--scaling does nothing here: it is an argument of its own"):
        speedup.estimate_training_speedup(("--scaling", "weak"))


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as leaving:
        speedup.main(["--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert all(name in shown for name in (*GPUS, *LINKS))


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


@pytest.mark.slow
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
    pictures = {"time", "speedup", "efficiency", "time_split", "utilisation", "cost"}
    assert {path.stem for path in report_folder.glob("*.png")} == pictures
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in Path(report_folder).glob("*.png"))
