"""Profiles of training: their content and files, and that they change no result."""

import gzip
import json
from collections import Counter

from agents_ranks import make_job, run_loop

from agents.learner.ppo import PPOConfig
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


def test_a_profile_names_all_sections_traces_one_iteration_and_changes_no_result(world, tmp_path):
    plain, lines = trained(world, tmp_path, profile=False)
    assert lines == [] and not (tmp_path / "profile").exists()
    with_profile, (text,) = trained(world, tmp_path, profile=True)
    assert differences(plain, with_profile) == [] and len(plain[0]) == 4
    assert set(text.split()) >= SECTIONS and (tmp_path / "profile" / "rank_0.txt").exists()
    (path,) = (tmp_path / "profile").glob("rank_0.*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    counts = Counter(event.get("name") for event in events if event.get("ph") == "X")
    # The trace contains a single iteration, which has 16 vector steps.
    assert counts["collect"] == counts["update"] == 1 and counts["environment"] == 16
    steps = plain[0][2]["optim/steps"]
    assert counts["forward"] == counts["backward"] == counts["optimizer"] == steps
