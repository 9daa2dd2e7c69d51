"""Profiles of training: their content and files, and that they change no result."""

import gzip
import json
from collections import Counter

import pytest
from agents_ranks import make_job, run_loop

from agents.learner.settings import PPOConfig
from agents.learner.trainer import Training
from rl_dist.resume_check import differences
from rl_dist.telemetry.metrics import NullWriter

SECTIONS = {"collect", "policy", "environment", "update", "forward", "backward", "optimizer"}
MACHINE = ("time/", "cpu/", "ram/", "ranks")  # metrics that differ between equal runs


def trained(world, run_dir, *, profile):
    """Train 4 iterations; return all results, and the lines printed for the user."""
    job = make_job(
        "recall, clstm", run_dir, iterations=4, ppo=PPOConfig(update_epochs=1), profile=profile
    )
    training, writer, records, lines = Training(job, job.make_env, world), NullWriter(), [], []
    writer.say = lines.append
    writer.write = lambda record, done: records.append(record)
    run_loop(training, writer)
    numbers = [{k: v for k, v in line.items() if not k.startswith(MACHINE)} for line in records]
    return [numbers, training.checked_state()], lines


@pytest.fixture(scope="module")
def profiled(world, tmp_path_factory):
    """Return the results of a training with a profile, the printed text, and its folder."""
    run_dir = tmp_path_factory.mktemp("profiled")
    results, (text,) = trained(world, run_dir, profile=True)
    return results, text, run_dir / "profile"


def test_only_the_flag_makes_a_profile_which_changes_no_result(profiled, world, tmp_path):
    plain, lines = trained(world, tmp_path, profile=False)
    assert lines == [] and not (tmp_path / "profile").exists()
    results, _, _ = profiled
    assert differences(plain, results) == [] and len(plain[0]) == 4


def test_a_profile_names_all_sections(profiled):
    _, text, folder = profiled
    assert set(text.split()) >= SECTIONS and (folder / "rank_0.txt").exists()


def test_a_trace_holds_a_single_iteration(profiled):
    (numbers, _), _, folder = profiled
    (path,) = folder.glob("rank_0.*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    counts = Counter(event.get("name") for event in events if event.get("ph") == "X")
    # An iteration has 16 vector steps.
    assert counts["collect"] == counts["update"] == 1 and counts["environment"] == 16
    steps = numbers[2]["optim/steps"]
    assert counts["forward"] == counts["backward"] == counts["optimizer"] == steps
