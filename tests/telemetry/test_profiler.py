"""Profiles of training: their content and files, and no effect on any number."""

import gzip
import json
from collections import Counter

import torch
from agents_ranks import make_job

from agents.ppo import PPOConfig
from agents.trainer import Training, train
from rl_dist.process_group.clock import section
from rl_dist.process_group.world import StopFlag
from rl_dist.resume_check import differences
from rl_dist.telemetry.metrics import NullWriter
from rl_dist.telemetry.profiler import GRADIENTS, WAITING, Profiler


class Keeping(NullWriter):
    """Keeps all lines and records that it gets, without times and usage."""

    def __init__(self):
        self.lines, self.records = [], []

    def say(self, text):
        self.lines.append(text)

    def write(self, record, *, done):
        machine = ("time/", "cpu/", "ram/", "ranks")
        self.records.append({k: v for k, v in record.items() if not k.startswith(machine)})


def trained(world, run_dir, *, profile):
    """Train 6 iterations; return all numbers, and the lines printed for the user."""
    options = {"ppo": PPOConfig(update_epochs=1), "profile": profile}
    job = make_job("recall, clstm", run_dir, iterations=6, **options)
    training, writer = Training(job, world), Keeping()
    train(training, writer, StopFlag())
    return [writer.records, training.replicated()], writer.lines


def profiled(world, run_dir, iterations):
    """Profile a loop that only adds; return the lines that the profiler prints."""
    profiler = Profiler(run_dir, world)
    lines = []
    for iteration in range(11, 11 + iterations):
        profiler.begin(iteration)
        with section("adding"):
            torch.ones(3) + 1
        profiler.end(lines.append)
    return lines


def rows_of(text):
    """Return the cells of a printed table, without its header."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_profile_changes_no_number_names_the_sections_and_traces_one_iteration(world, tmp_path):
    plain, lines = trained(world, tmp_path, profile=False)
    assert lines == [] and not (tmp_path / "profile").exists()
    with_profile, (text,) = trained(world, tmp_path, profile=True)
    assert differences(plain, with_profile) == [] and len(plain[0]) == 6
    seconds = {name: float(spent) for name, spent, _ in rows_of(text.split("operators of")[0])}
    for outer, parts in (
        ("collect", ("policy", "environment")),
        ("update", ("forward", "backward", "optimizer")),
    ):
        spent = [seconds[f"{outer}/{part}"] for part in parts]
        assert min(spent) > 0.0 and sum(spent) <= seconds[outer] + 1e-3
    for words in ("iterations 2 to 3", "operators of iteration 5", "aten::", GRADIENTS, WAITING):
        assert words in text
    assert text.startswith((tmp_path / "profile" / "rank_0.txt").read_text().rstrip())
    (path,) = (tmp_path / "profile").glob("rank_0.*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    counts = Counter(event.get("name") for event in events if event.get("ph") == "X")
    # the trace holds one iteration: 16 vector steps
    assert counts["collect"] == counts["update"] == 1 and counts["environment"] == 16
    steps = plain[0][4]["optim/steps"]
    assert counts["forward"] == counts["backward"] == counts["optimizer"] == steps


def test_a_process_has_one_window_and_a_resumed_one_its_own(world, tmp_path, caplog):
    assert profiled(world, tmp_path, 3) == []
    for number in (1, 2):
        (line,) = profiled(world, tmp_path, 12)
        assert "iterations 12 to 13" in line and "aten::add" in line
        assert len(list((tmp_path / "profile").glob("*.json.gz"))) == number
    (tmp_path / "file" / "profile").parent.mkdir()
    (tmp_path / "file" / "profile").write_text("in the way")
    (line,) = profiled(world, tmp_path / "file", 5)
    assert "adding" in line and "cannot be written" in caplog.text
