"""Faults during training on two ranks: one error line, and no process remains."""

import json
import re
import signal
import time

import pytest
import torch
from agents_ranks import world_of_one
from faults_ranks import MISDEEDS, log_of, restarts
from torch.distributed.elastic.utils.distributed import get_free_port
from train_runs import RECALL, REPO, end_of, iterations, records, start, start_training, wait_until

from rl_dist.checkpoint.store import latest_checkpoint

ITERATION = 4 * 16  # environment steps of one iteration
SMALL = [*RECALL[2:], "--validate_every=0", "--eval_episodes=4"]  # RECALL without --env


def finish(job, code=0, tracebacks=0):
    """Check that a job ends with `code` and leaves no process; return error lines."""
    stderr = end_of(job, code)
    assert stderr.count("Traceback") == tracebacks, stderr
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


# ---- faults after which training continues


def test_misbehaving_environments_restart_as_on_one_rank(ranks, ranks_folder, tmp_path):
    """Assertions for other faults run inside the ranks: see tests/faults_ranks.py."""
    with world_of_one() as world:
        alone = restarts(world, tmp_path)
    assert ranks[0]["counts"] == ranks[1]["counts"] == alone["counts"] == [0, 5, 0]
    assert log_of(ranks_folder / "restarts", 1).count("rebuilt, 1 of 1") == 3
    # step 20 of an environment is step 4 of its second rollout, so it has index 3
    faulty = [*MISDEEDS]
    assert alone["truncated"][3, faulty].all() and not alone["plain rewards"][3, faulty].any()
    assert torch.isfinite(alone["obs"]).all()
    for name in ("obs", "truncated", "plain rewards"):
        joined = torch.cat([rank[name] for rank in ranks], dim=alone[name].shape.index(8))
        torch.testing.assert_close(joined, alone[name], rtol=0, atol=1e-12)
    torch.testing.assert_close(ranks[0]["parameters"], alone["parameters"], rtol=0, atol=1e-10)


# ---- faults that end a job


def misbehaving(run_dir, misdeeds, at, *flags, stream="environment", ranks=2):
    """Start a run in which environments misbehave at step `at`.

    `misdeeds` maps the number of an environment to its misdeed.
    """
    kwargs = json.dumps({"misdeeds": misdeeds, "at": at, "stream": stream})
    env = ["--env=misbehaving_envs:Misbehaving-v0", "--env_kwargs", kwargs]
    return start_training(*env, "--run_dir", run_dir, *SMALL, "--num_gpus", ranks, *flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    "misdeed, stream, at, problem",
    [
        ("hang", "environment", 20, "did not come back within 1 s"),
        ("nan", "environment", 20, "observation is nan"),
        ("hang in C", "environment", 20, "within 1 s .--env_timeout. and cannot be interrupted"),
        ("hang", "evaluation", 5, "did not come back within 1 s"),
    ],
)
def test_a_fault_of_an_environment_ends_the_job_and_names_rank_number_and_step(
    misdeed, stream, at, problem, tmp_path
):
    flags = ["--env_timeout=1", "--total_steps", 4 * ITERATION, "--validate_every=2"]
    job = misbehaving(tmp_path, {3: misdeed}, at, *flags, stream=stream)
    (line,) = finish(job, 1)
    where = f"rank 1: .*environment misbehaving_envs:Misbehaving-v0 number 3 at its step {at}: "
    assert re.search(f"{where}.*{problem}", line), line
    assert iterations(tmp_path) == [1]
    if misdeed == "hang in C":
        assert "in step\n" in log_of(tmp_path, 1)


@pytest.mark.slow
def test_with_env_restarts_a_run_continues_even_if_many_environments_hang(
    tmp_path,
):
    run_dir = tmp_path / "run"
    misdeeds = {1: "raise", 2: "nan", 4: "hang", 5: "hang", 6: "reward", 7: "shape"}
    flags = ["--env_timeout=6", "--collective_timeout=5", "--env_restarts=1", "--num_envs=8"]
    finish(misbehaving(run_dir, misdeeds, 20, *flags, "--total_steps", 6 * ITERATION))
    assert [line["env/restarts"] for line in records(run_dir)] == [0, 6, 0]
    for number in misdeeds:
        line = f"Misbehaving-v0 number {number} at its step 20: "
        assert (log_of(run_dir, 0) + log_of(run_dir, 1)).count(line) == 1


def test_a_signal_during_the_evaluation_ends_the_run_with_a_single_event(
    tmp_path,
):
    run_dir = tmp_path / "run"
    note = f"echo $RL_EVENT $RL_EXIT_CODE >> {tmp_path}/events"
    flags = ["--env_timeout=0", "--total_steps", ITERATION, "--on_event", note]
    job = misbehaving(run_dir, {3: "hang"}, 5, *flags, stream="evaluation", ranks=1)
    path = run_dir / "state.json"
    wait_until(lambda: path.exists() and '"evaluation"' in path.read_text(), job)
    time.sleep(0.5)  # probably the evaluation has begun; if not, the result is the same
    job.send_signal(signal.SIGTERM)
    finish(job, 143)
    assert (tmp_path / "events").read_text() == "stopped 143\n"
    assert latest_checkpoint(run_dir).name == "iteration_00000001.pt"


# ---- a callback, core or logger of the user exits or hangs


ODD = {
    "callback": ["--callback=odd_code:call"],
    "core": ["--policy=own", "--core=odd_code:Core"],
    "logger": ["--loggers=json"],
}
ON_2 = ["--num_gpus=2"]


@pytest.mark.parametrize(
    "odd, flags, says",
    [
        ("callback exit -1", [], "callback raised SystemExit: 0"),
        ("core exit 0", [*ON_2, "--max_restarts=1"], "rank 0 failed with SystemExit: 0"),
        ("logger exit -1", [], ""),  # only the records of the logger are lost
        ("callback hang -1", [], "rank 0: made no progress for 3 s in iteration callback"),
        ("logger hang -1", [], "rank 0: made no progress for 3 s in loggers"),
        ("core hang 1", ON_2, "rank 1"),
    ],
)
def test_user_code_that_exits_or_hangs_fails_the_job_and_is_named(
    odd, flags, says, tmp_path, monkeypatch
):
    monkeypatch.setenv("ODD", odd)
    words = [*RECALL, "--total_steps", 3 * ITERATION, "--validate_every=0", "--eval_episodes=2"]
    words += ["--run_dir", tmp_path / "run", "--on_event", f"echo $RL_EVENT > {tmp_path}/event"]
    words += ["--collective_timeout", 3 if "hang" in odd else 60, *ODD[odd.split()[0]], *flags]
    job = start(REPO / "tests" / "odd_code.py", *words)
    errors = finish(job, bool(says), tracebacks="failed with" in says)
    assert len(errors) == bool(says) and says in "".join(errors)
    assert (tmp_path / "run/summary.json").exists() != bool(says)
    assert (tmp_path / "event").read_text() == ("failed\n" if says else "finished\n")


# ---- ranks that were started with different settings


def test_ranks_with_different_settings_end_together_and_name_all_flags(tmp_path, monkeypatch):
    """Start 2 ranks without our launcher; the second has another --gamma and another --env."""
    flags = [*RECALL, "--total_steps", ITERATION, "--eval_episodes=2"]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": get_free_port()}
    variables |= dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], 2)
    jobs = []
    for rank in range(2):
        for name, value in (variables | dict.fromkeys(["RANK", "LOCAL_RANK"], rank)).items():
            monkeypatch.setenv(name, str(value))
        others = ["--gamma=0.95", "--env=CartPole-v1"] if rank else []
        jobs.append(start_training(*flags, "--run_dir", tmp_path / "run", *others))
    for job in jobs:
        (line,) = finish(job, 2)
        assert "env 'CartPole-v1' (not 'Recall-v0')" in line and "gamma 0.95 (not 0.99)" in line
        assert "chosen_preset" not in line  # it is no flag
    assert not (tmp_path / "run/summary.json").exists()
