"""Calibration and the speedup command: from flags or a run directory to predictions."""

import contextlib
import json
import math
from dataclasses import replace

import pytest
import torch
from agents_ranks import make_job, world_of_one

from agents.trainer import Training, train
from rl_dist.errors import UserError
from rl_dist.hardware import memory
from rl_dist.hardware.memory import HostMemory
from rl_dist.launch.short_run import ShortRunTimeoutError, Trial
from rl_dist.process_group.world import StopFlag, threads_per_rank
from rl_dist.speedup import calibration, reduction_bench
from rl_dist.speedup import command as speedup
from rl_dist.speedup.calibration import Calibration, Point
from rl_dist.speedup.machines import GPUS, LINKS
from rl_dist.speedup.model import SMALL_COLLECTIVES, Communication, RankCost, modelled_communication
from rl_dist.speedup.rank_cost import share_flags, shorter_rollout, steps_per_episode
from rl_dist.speedup.reduction_bench import Reductions, measure_reductions
from rl_dist.speedup.report import COLUMNS, Budget, duration, report_of, table
from rl_dist.telemetry.metrics import NullWriter
from rl_dist.telemetry.progress import Stages

TINY = [
    "--env", "Recall-v0", "--num_envs", "4", "--num_steps", "16", "--bptt_steps", "8",
    "--batch_size", "4", "--hidden_size", "8",
]  # fmt: skip
WORK = RankCost(
    env_steps=1000, gradient_steps=10, collect_s=1.0, forward_s=0.3, backward_s=0.6, optimizer_s=0.1
)


# ---- shares, rollouts and episodes


def test_a_ranks_share_has_the_totals_divided_or_the_same():
    assert share_flags(64, 128, 2, "strong") == (["--num_envs=32", "--batch_size=64"], "")
    assert share_flags(64, 128, 2, "weak") == (["--num_envs=64"], "")
    flags, problem = share_flags(64, 128, 3, "strong")
    assert not flags and "3 ranks" in problem and "--scaling weak" in problem


@pytest.mark.parametrize(
    ("num_steps", "bptt_steps", "batch_size", "times"),
    [
        (128, 32, 128, 2),  # two sequences of each environment are one minibatch of 128
        (128, 32, 64, 4),
        (128, 32, 256, 1),
        (128, 32, 0, 1),  # batch_size auto
        (96, 32, 64, 3),
        (2048, 32, 64, 4),  # not ever shorter: what is fixed in an iteration would weigh too much
    ],
)
def test_rollouts_are_shortened_to_whole_minibatches(num_steps, bptt_steps, batch_size, times):
    sizes = {"num_steps": num_steps, "bptt_steps": bptt_steps, "batch_size": batch_size}
    assert shorter_rollout(sizes, num_envs=64) == times


def test_steps_per_episode():
    records = [{"episode/count": 2, "global_step": 100 * n, "iteration": n} for n in (3, 4)]
    assert steps_per_episode(records) == 50.0
    assert math.isnan(steps_per_episode([records[0] | {"episode/count": 0}]))


# ---- collectives


def test_training_makes_as_many_small_collectives_as_are_measured(tmp_path):
    """Besides a reduction for each gradient step, which announces itself as well."""
    job = make_job("recall, clstm", tmp_path, iterations=3, dtype=torch.float32)
    quiet = {"sync_check_every": 0, "checkpoint_every": 100, "keep_best": "off"}
    job = replace(job, train=replace(job.train, **quiet))
    calls = []
    with world_of_one() as world:

        class Counting(NullWriter):
            def write(self, record, *, done):
                calls.append(world.doing.calls)

        train(Training(job, world), Counting(), StopFlag())
    bench = reduction_bench
    assert calls[1] - calls[0] == SMALL_COLLECTIVES
    assert bench.SUMS + bench.AGREEMENTS + 2 * bench.GATHERS == SMALL_COLLECTIVES


@pytest.mark.slow
def test_reductions_are_measured_between_ranks():
    found = measure_reductions(2, [4096, 2**20], repeats=8)
    assert found.ranks == 2 and set(found.gradients_s) == {4096, 2**20}
    assert all(1e-6 < seconds < 5.0 for seconds in (*found.gradients_s.values(), found.small_s))


def test_modelled_communication_grows_with_ranks_and_machines():
    def cost(ranks):
        return modelled_communication(2**20, ranks, 8, LINKS["NVLink 4"], LINKS["InfiniBand NDR"])

    assert cost(1) == Communication()
    assert cost(2).gradient_s < cost(8).gradient_s < cost(16).gradient_s


# ---- injected machines


class Machine:
    """Stands for machines larger than this: remembers what was asked, gives plausible records."""

    def __init__(self, monkeypatch, cores=2, gpus=0, copy_bytes=0):
        self.asked, self.shares, self.reduced = [], [], []
        self.copy_bytes = copy_bytes
        self.too_long, self.first_s = False, 0.0
        monkeypatch.setattr(calibration, "measure_short_runs", self.measure_short_runs)
        monkeypatch.setattr(calibration, "measure_reductions", self.measure_reductions)
        monkeypatch.setattr(calibration, "available_cores", lambda: cores)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
        self.device_type = "cuda" if gpus else "cpu"

    def measure_short_runs(
        self, flags, copies, threads, iterations, *, device_type, on_wait, **options
    ):
        if self.asked and self.too_long:
            raise ShortRunTimeoutError("too long")
        if options.get("first_s", math.inf) < self.first_s:
            raise ShortRunTimeoutError("too slow", {"ppo": {"update_epochs": 4}})
        self.flags = flags
        on_wait(0.5)
        sizes = [flag for flag in flags if "num_envs" in flag or "batch" in flag]
        self.asked.append((copies, threads))
        self.shares.append(sizes)
        share = int(sizes[0].partition("=")[2]) / 64 if sizes else 1.0
        parts = ("collect", "forward", "backward", "optimizer")
        record = {f"time/{name}_s": 0.05 + 0.05 * share for name in parts}
        names = ("sync_s", "gradient_wait_s", "step_spread_s")
        record |= {f"time/{name}": 0.0 for name in names} | {"optim/steps": 8.0}
        steps = round(8192 * share)
        record |= {"time/sps": steps / 0.5, "global_step": steps, "iteration": 1}
        record |= {"episode/count": 32, "episode/length": 256.0}
        config = {"train": {"num_steps": 128, "batch_size": 128}, "task": {"env": "Recall-v0"}}
        return Trial([[record, record]] * copies, config, 4_000_000, self.copy_bytes)

    def measure_reductions(self, ranks, sizes, device_type, threads, timeout_s):
        self.reduced.append(ranks)
        return Reductions(ranks, {size: 1e-5 + size * 1e-11 for size in sizes}, 1e-4)

    def calibrate(self, gpus, **options):
        stages = Stages(shown=False)
        options = {"device_type": self.device_type, "stages": stages} | options
        found = calibration.calibrate([], gpus, **options)
        assert stages.number == stages.total == len(self.asked) + len(self.reduced)
        return found


def test_gpus_that_are_here_are_measured_and_machines_beyond_modelled(monkeypatch):
    machine = Machine(monkeypatch, gpus=2)
    found = machine.calibrate([2, 8], scalings=["strong"], between=LINKS["InfiniBand NDR"])
    assert found.ranks_per_machine == 2 and found.gradient_bytes == 4_000_000
    assert [copies for copies, _ in machine.asked] == [1, 2, 2]  # a full machine of the four
    assert machine.shares[1] == ["--num_envs=8", "--batch_size=16"] and machine.reduced == [2]
    two, eight = found.points[1:]
    assert two.communication == Communication(gradient_s=pytest.approx(5e-5), small_s=1e-4)
    network_s = LINKS["InfiniBand NDR"].base_s
    assert eight.communication.gradient_s > two.communication.gradient_s + network_s
    assert two.measured and not eight.measured


def test_one_gpu_stands_for_a_machine_of_eight_by_the_link_of_its_kind(monkeypatch):
    machine = Machine(monkeypatch, gpus=1)
    found = machine.calibrate([8], scalings=["strong"], ranks_per_machine=8)
    assert found.link == LINKS["NVLink 4"] and not machine.reduced
    assert machine.asked[1] == (1, max(1, threads_per_rank(8)))
    assert found.points[1].communication.gradient_s == LINKS["NVLink 4"].all_reduce_s(4_000_000, 8)


# ---- quick: as many copies as cores, the rest modelled


@pytest.mark.parametrize("gpus", [[1, 2], [1, 2, 4, 8], [64], [1, 2, 4, 8, 16, 32, 64]])
def test_no_list_of_gpus_needs_more_copies_than_cores(monkeypatch, gpus):
    machine = Machine(monkeypatch)
    found = machine.calibrate(gpus)
    assert max(copies for copies, _ in machine.asked) == 2
    for point in found.points:
        assert point.measured == (point.ranks <= 2)
        error = 0.0 if point.measured else 0.1
        assert point.prediction.relative_error == error and point.prediction.iteration_s > 0


def test_ranks_that_share_cores_take_as_many_times_longer(monkeypatch):
    found = Machine(monkeypatch).calibrate([2, 8], scalings=["strong"], link=LINKS["loopback"])
    two, eight = found.points[1:]
    assert two.work.collect_s == pytest.approx(0.05 + 0.05 / 2)
    assert eight.work.collect_s == pytest.approx((0.05 + 0.05 / 8) * 4)


def test_when_the_time_is_used_up_one_rank_is_enough(monkeypatch):
    machine, first = Machine(monkeypatch), []
    machine.too_long = True
    monkeypatch.setattr(calibration, "QUICK_S", 0.0)
    options = {"stages": Stages(shown=False), "device_type": "cpu", "on_first": first.append}
    found = calibration.calibrate([], [1, 2, 8], **options)
    assert len(machine.asked) == 1 and not machine.reduced
    assert [point.ranks for point in found.points if point.measured] == [1, 1]
    assert [point.work for point in first[0].points] == [point.work for point in found.points]
    assert "reductions assumed" in found.sources and "--thorough" in found.sources


def test_of_a_job_that_is_slow_here_one_epoch_stands_for_all(monkeypatch):
    machine = Machine(monkeypatch)
    machine.first_s = 60.0
    options = {"stages": Stages(shown=False), "device_type": "cpu", "link": LINKS["loopback"]}
    found = calibration.calibrate(["--update_epochs=4"], [2], **options)
    assert (
        machine.flags.count("--update_epochs=1") == 1 and "--update_epochs=4" not in machine.flags
    )
    assert found.one.work.gradient_steps == 4 * 8 and found.one.work.relative_error == 0.1
    assert found.one.work.collect_s == pytest.approx(0.1)
    assert found.one.work.forward_s == pytest.approx(4 * 0.1)


def test_for_cards_a_share_is_measured_with_nothing_beside_it(monkeypatch):
    machine = Machine(monkeypatch)
    found = machine.calibrate([2, 4], uncontended=True, link=LINKS["loopback"])
    alone = [
        sizes
        for sizes, (copies, _) in zip(machine.shares, machine.asked, strict=True)
        if copies == 1
    ]
    assert ["--num_envs=32", "--batch_size=64"] in alone
    assert all(threads == threads_per_rank(1) for copies, threads in machine.asked if copies == 1)
    assert [point.alone is None for point in found.points] == [True, False, False] * 2
    weak = [point for point in found.points if point.scaling == "weak" and point.ranks > 1]
    assert all(point.alone == found.one.work for point in weak)


# ---- thorough: every number of ranks with as many copies


def test_thorough_measures_every_number_of_ranks(monkeypatch):
    machine = Machine(monkeypatch)
    found = machine.calibrate([2, 4, 8], thorough=True)
    assert sorted(copies for copies, _ in machine.asked) == [1, 2, 2, 4, 4, 8, 8]
    assert sorted(machine.reduced) == [2, 4, 8] and all(point.measured for point in found.points)


def test_what_cannot_be_divided_is_not_in_the_plan(monkeypatch):
    machine = Machine(monkeypatch)
    found = machine.calibrate([2, 3], thorough=True, link=LINKS["loopback"])  # 64 environments
    assert [point.problem != "" for point in found.points] == [False, False, True] + 3 * [False]
    assert sorted(copies for copies, _ in machine.asked) == [1, 2, 2, 3]


def test_far_more_copies_than_cores_are_refused_before_anything_starts(monkeypatch):
    machine = Machine(monkeypatch)
    with pytest.raises(UserError, match=r"9 trainings .* at most 8: .*--gpus_per_machine 8"):
        machine.calibrate([2, 9], thorough=True)
    assert not machine.asked


def test_more_copies_than_fit_in_memory_are_refused_or_not_measured(monkeypatch):
    # a container's share
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(2**36, 30 * 2**30))
    machine = Machine(monkeypatch, copy_bytes=10 * 2**30)
    with pytest.raises(UserError, match="about 10 GiB each do not fit"):
        machine.calibrate([4], thorough=True)
    assert len(machine.asked) == 1
    quick = Machine(monkeypatch, cores=8, copy_bytes=10 * 2**30)
    quick.calibrate([4])
    assert max(copies for copies, _ in quick.asked) == 3


# ---- reports


def calibration_of(*points, **changes):
    facts = {
        "device_type": "cpu", "ranks_per_machine": 2, "link": LINKS["loopback"],
        "between": LINKS["loopback"], "gradient_bytes": 10**6, "num_envs": 64, "batch_size": 128,
        "steps_per_episode": 50.0, "cores": 2, "one": points[0], "points": list(points),
    } | changes  # fmt: skip
    return Calibration(**facts)


ONE = Point(ranks=1, scaling="strong", work=WORK)
TWO = Point(ranks=2, scaling="weak", work=WORK, communication=Communication(gradient_s=0.05))
THREE = Point(ranks=3, scaling="strong", problem="num_envs 64 does not divide")
LENGTH = {"num_episodes": 7200, "steps_per_episode": 50.0}
BUDGET = Budget(**LENGTH, price_per_hour=2.0)


def test_rows_hold_speedup_time_cost_and_source():
    found = calibration_of(ONE, replace(TWO, measured=False), THREE)
    one, two, three = report_of(found, BUDGET, [], {(2, "weak"): 750.0}).rows
    assert (one["speedup"], one["efficiency"], one["source"]) == (1.0, 1.0, "measured")
    assert two["steps_per_s"] == pytest.approx(2000 / 2.5) and two["source"] == "modelled"
    assert (two["speedup"], two["efficiency"]) == (pytest.approx(1.6), pytest.approx(0.8))
    assert two["shares"]["communication"] == pytest.approx(0.2)
    assert one["hours"] == pytest.approx(360_000 / 500 / 3600)
    assert one["cost"] == pytest.approx([0.4, 0.4])
    assert two["cost"] == pytest.approx([2 * 2.0 * two["hours"]] * 2)
    assert two["measured_steps_per_s"] == 750.0
    assert three["problem"] and "speedup" not in three


def test_electricity_is_a_way_to_pay_and_no_price_is_none():
    powered = Budget(**LENGTH, power_watts=500.0, power_price=0.3)
    row = report_of(calibration_of(ONE), powered, [], {}).rows[0]
    assert row["cost"] == pytest.approx([0.5 * 0.3 * row["hours"]] * 2)
    assert report_of(calibration_of(ONE), Budget(**LENGTH), [], {}).rows[0]["cost"] is None
    endless = report_of(calibration_of(ONE), Budget(num_episodes=1), [], {})
    assert endless.rows[0]["hours"] is None and "no episode ended" in table(endless)


def test_cards_one_does_not_own_are_marked_and_unequal_ones_go_at_the_slowest():
    names = ("A100", "A100 + H100 SXM", "H100 SXM")
    cards = [speedup.find_gpus(name) for name in names]
    report = report_of(calibration_of(ONE, TWO), Budget(**LENGTH), cards, {})
    rows = {row["machine"]: row for row in report.rows if row["gpus"] == 2}
    assert [row["estimate"] for row in rows.values()] == [False, True, True, True]
    assert rows["A100"]["unit"] == "GPUs" and rows["this machine"]["unit"] == "ranks"
    a100, both, h100 = (rows[name] for name in names)
    assert a100["steps_per_s"] == pytest.approx(both["steps_per_s"])
    assert h100["steps_per_s"] > a100["steps_per_s"] and both["cost"][0] > a100["cost"][0]
    assert "estimate" in table(report) and report.notes


def test_cards_are_estimated_from_a_share_that_nothing_competed_with():
    """Four copies on too few cores are each four times slower, which no card's owner would see."""
    slow = replace(WORK, collect_s=4.0)
    rollouts = replace(WORK, forward_s=0.0, backward_s=0.0, optimizer_s=0.0)
    four = Point(ranks=4, scaling="weak", work=slow, alone=rollouts, copies=4)
    found = calibration_of(replace(ONE, work=rollouts), four, ranks_per_machine=4, cores=1)
    rows = report_of(found, BUDGET, [speedup.find_gpus("H100 SXM")], {}).rows
    here, card = (row for row in rows if row["gpus"] == 4)
    assert here["speedup"] < 1.0 and card["speedup"] == pytest.approx(4.0, rel=0.01)


def test_notes_tell_of_busy_and_shared_cores_and_of_an_assumed_network():
    crowd = {"cores": 4, "ranks_per_machine": 16, "load": 3.0, "sources": "measured: 1 x the job"}
    found = calibration_of(ONE, replace(TWO, ranks=16), between=None, **crowd)
    cards = [speedup.find_gpus("H100 SXM")]
    notes = " ".join(report_of(found, BUDGET, cards, {}).notes)
    for words in ("measured: 1 x", "was busy, 3.0", "more than 4 ranks", "NDR is assumed"):
        assert words in notes
    named = replace(found, between=LINKS["Ethernet 25"])
    assert "is assumed" not in " ".join(report_of(named, BUDGET, cards, {}).notes)
    assert not report_of(calibration_of(ONE, TWO), BUDGET, [], {}).notes


def test_the_table_holds_every_column_and_remark():
    unsure = replace(TWO, work=replace(WORK, relative_error=0.1))
    points = (ONE, unsure, THREE, replace(unsure, ranks=4), replace(ONE, scaling="weak"))
    report = report_of(calibration_of(*points), BUDGET, [], {(2, "weak"): 750.0})
    text = table(report)
    heads = ("ranks", *COLUMNS, "cost (as --price_per_hour)")
    remarks = ("cannot be, num_envs 64", "itself measured 750 steps/s", "7.5 min (6.03 min to")
    for part in (*heads, *remarks, "1.60x", "80%", "800"):
        assert part in text
    assert text.count("-> raise --batch_size for fewer") == 1
    rows = [line.split()[1] for line in text.splitlines() if line.startswith("| ")]
    assert rows == ["ranks", "1", "2", "3", "4"]  # one rank once
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2e-6, "2 us"), (0.0251, "25.1 ms"), (59, "59 s"), (600, "10 min"), (864_000, "10 days")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


# ---- the command


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--gpus 0", "--gpus: must be 1..100000, got 0"),
        ("--gpus two", "invalid int value: 'two'"),
        ("--gpu H1000", "'H1000' is not known; there are A100"),
        ("--link string --gpus 2", "'string' is not known; there are NVLink 3"),
        ("--power_watts 300", "--power_watts and --power_price go together"),
        ("--power_watts 1 --power_price 1 --price_per_hour 1", "leave one out"),
        ("--price_per_hour -1", "must be 0..1e+12, got -1"),
        ("--iterations 0", "must be 1..1e+12, got 0"),
        ("--resume runs/x", "--resume does nothing here"),
        ("--num_gpus banana", "--num_gpus does nothing here: use --gpus"),
        ("--lr-scaling sqrt", "--lr_scaling does nothing here: leave it out"),
        ("--thorough --device cpu --gpus 100000", "100000 trainings side by side are too many"),
        (f"--out {__file__}", f"--out {__file__} cannot be written"),
        ("--gpus 4 --gpus_per_machine 2", "name the network between them"),
        ("--link NVLink_4 --gpus 1", "--link NVLink 4 does nothing"),
        ("--between loopback", "--between loopback does nothing"),
        ("nowhere", "nowhere is no run directory"),
        ("--device cuda", "torch sees no CUDA GPU"),
        (" ".join(TINY[:-1]) + " none", "hidden_size"),
    ],
)
def test_bad_usage_is_one_line(argv, words, capsys):
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    argv = [word.replace("NVLink_4", "NVLink 4") for word in argv.split()]
    assert speedup.main([*argv, "--json"]) == 2
    out, err = capsys.readouterr()
    assert not out and words in err.splitlines()[-1] and err.splitlines()[-1].startswith("error: ")


def test_python_callers_give_arguments_instead_of_flags():
    with pytest.raises(UserError, match="--scaling does nothing here: it is an argument"):
        speedup.estimate_training_speedup(("--scaling", "weak"))


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as leaving:
        speedup.main(["--help"])
    shown = capsys.readouterr().out
    assert leaving.value.code == 0 and "examples:" in shown and "--thorough" in shown
    assert all(name in shown for name in (*GPUS, *LINKS))


@pytest.mark.slow
def test_the_command_measures_prints_twice_and_writes_everything(tmp_path):
    """A tiny job on one and two ranks: short runs and reductions, all real."""
    flags = "--gpus 2 --scaling weak --iterations 3 --num_episodes 1000 --price_per_hour 1"
    argv = [*TINY, *flags.split(), "--gpu", "H100 SXM", "--out", str(tmp_path)]
    with (tmp_path / "stdout").open("w") as out, contextlib.redirect_stdout(out):
        assert speedup.main(argv) == 0
    printed = (tmp_path / "stdout").read_text()
    assert printed.startswith("FIRST FIGURES") and "REFINED FIGURES" in printed
    report = json.loads((tmp_path / "speedup.json").read_text())
    here = [row for row in report["rows"] if row["machine"] == "this machine"]
    assert [row["gpus"] for row in here] == [1, 2]
    for row in here:
        assert row["steps_per_s"] > 0 and row["hours"] > 0 and row["cost"][0] > 0
        assert row["env_steps"] == 64 * row["gpus"]
        assert sum(row["shares"].values()) == pytest.approx(1.0)
    assert report["calibration"]["gradient_bytes"] > 1000
    assert "H100 SXM, an estimate" in (tmp_path / "speedup.md").read_text()
    assert (tmp_path / "speedup.png").read_bytes()[:4] == b"\x89PNG"
