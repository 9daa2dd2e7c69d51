"""Faults during training on two ranks: the user sees one line, and no process is left."""

import json
import signal
import time

import faults_ranks
import psutil
import pytest
import torch
from agents_ranks import world_of_one
from train_runs import (
    RECALL,
    REPO,
    assert_nobody_left,
    records,
    start,
    start_training,
    wait_until,
)

from agents.trainer import Training, train
from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint
from rl_dist.process_group.join import free_port
from rl_dist.process_group.world import StopFlag

SMALL = RECALL[2:]  # of any environment
THREE_ITERATIONS = ["--total_steps", 3 * 4 * 16, "--validate_every", 0]


def error_line(stderr):
    """The one error among a job's other lines."""
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in stderr, stderr
    return line


def finish(job):
    """Wait until a job and all its processes have ended; (code, stdout, stderr)."""
    out, err = job.communicate(timeout=240)
    assert_nobody_left(job.pid)
    return job.returncode, out, err


# ---- faults that a rank survives, in one job


@pytest.fixture(scope="module")
def ranks(ranks_folder):
    return [torch.load(ranks_folder / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


def log(folder, scenario, rank=0):
    return (folder / scenario / "logs" / f"rank_{rank}.log").read_text()


def test_environments_that_misbehave_begin_again_with_the_step_truncated(ranks, ranks_folder):
    for rank, own in enumerate(rank["restarts"] for rank in ranks):
        assert own["error"] == "" and own["counts"] == [0, 5, 0]
        for column in range(4):
            faulty = 4 * rank + column in faults_ranks.MISDEEDS
            # step 20 of a life is index 3 of iteration 2's rollout; an episode has 7 steps
            expected = [t for t in range(16) if (t + 17) % 7 == 0]
            if faulty:
                again = [t for t in range(4, 16) if (t - 3) % 7 == 0]
                expected = [*(t for t in expected if t < 3), 3, *again]
            assert own["truncated"][:, column].nonzero()[:, 0].tolist() == expected
            assert own["plain rewards"][3, column] == (0.0 if faulty else 1.0)
        assert not own["terminated"].any()
        assert torch.isfinite(own["obs"]).all()
    assert log(ranks_folder, "restarts", 1).count("made again, 1 of 1") == 3


def test_restarts_are_the_same_on_one_rank_as_on_two(ranks, tmp_path):
    with world_of_one() as world:
        one = faults_ranks.restarts(world, tmp_path)
    two = [rank["restarts"] for rank in ranks]
    obs = torch.cat([rank["obs"] for rank in two], dim=2)
    torch.testing.assert_close(obs, one["obs"], rtol=0, atol=1e-12)
    torch.testing.assert_close(two[0]["parameters"], one["parameters"], rtol=0, atol=1e-10)


def test_restarts_are_counted_once_from_the_warm_up_on_and_not_again_after_a_resume(tmp_path):
    def job(iterations):
        options = {"at": 10, "env_restarts": 2, "iterations": iterations}
        return faults_ranks.restart_job(tmp_path, "MisbehavingSaved-v0", **options)

    with world_of_one() as world:
        _, found, error = faults_ranks.run(job(2), world)
        # 5 restarts in the warm-up and 5 in iteration 1
        assert error == "" and [record["env/restarts"] for record in found] == [5 + 5, 0]
        resumed, writer = Training(job(3), world), faults_ranks.Keeping()
        resumed.restore(load_checkpoint(latest_checkpoint(tmp_path)))
        assert sum(resumed.env.restarts) == 10
        train(resumed, writer, StopFlag())
    assert [record["env/restarts"] for record in writer.records] == [0]


def test_bad_steps_of_one_rank_are_skipped_by_all_and_too_many_end_the_run(ranks, ranks_folder):
    path = latest_checkpoint(ranks_folder / "bad_steps")
    assert path.name == "iteration_00000002.pt"
    for rank, found in enumerate(ranks):
        one, many, stopped = (found[name] for name in ("one_bad_step", "bad_steps", "kl_stop"))
        assert one["error"] == "" and one["skipped"] == [0, 1, 0] and one["finite"]
        assert len(one["hashes"]) == len(set(one["hashes"])) == 3 * 4 - 1  # the optimizer's steps
        assert log(ranks_folder, "one_bad_step", rank).count("step skipped") == 1
        assert "--max_bad_steps 3" in many["error"] and str(path) in many["error"]
        assert len(many["steps"]) == 2 and len(many["hashes"]) == 4 + 2
        # all stop at the KL of the steps they took
        assert stopped["error"] == "" and stopped["steps"] == [1, 2]
    for name in ("one_bad_step", "kl_stop"):
        assert ranks[0][name]["hashes"] == ranks[1][name]["hashes"]
    saved = torch.cat([value.flatten() for value in load_checkpoint(path)["policy"].values()])
    assert torch.equal(saved, ranks[0]["bad_steps"]["last"])  # of iteration 2


@pytest.mark.parametrize(
    ("scenario", "iteration", "what"),
    [
        ("drift", 4, "critic_head.weight"),
        ("drift_saved", 3, "critic_head.weight"),
        ("drift_optimizer", 1, "optimizer exp_avg of critic_head.weight"),
        ("drift_normalizer", 4, "normalizer obs.moments.mean"),
    ],
)
def test_whatever_drifts_is_found_at_the_next_check_by_rank_and_name(
    ranks, ranks_folder, scenario, iteration, what
):
    for found in (rank[scenario] for rank in ranks):
        assert found["iteration"] == iteration and f"rank 1 in {what} (" in found["error"]
    assert not (ranks_folder / scenario / "checkpoints").exists()


@pytest.mark.parametrize(("phase", "rank"), [("collect", 1), ("update", 0)])
def test_a_slow_rank_is_named_once_with_the_phase(ranks, ranks_folder, phase, rank):
    assert ranks[0][f"slow_{phase}"]["error"] == ""
    line = f"straggler: rank {rank} is slow in {phase}: "
    assert log(ranks_folder, f"slow_{phase}").count(line) == 1


@pytest.mark.parametrize(
    ("scenario", "place"), [("other_call", "sum of "), ("other_call_in_step", "gradient reduction")]
)
def test_a_rank_that_makes_another_collective_call_is_found_by_all(ranks, scenario, place):
    for error in (rank[scenario]["error"] for rank in ranks):
        assert f"rank 0 in '{place}" in error
        assert "rank 1 in 'agreement on a number' (collective " in error


# ---- faults that end a job


def misbehaving(run_dir, misdeeds, at, *flags, stream="environment", ranks=2):
    """The flags of a run of which some environments misbehave."""
    kwargs = json.dumps({"misdeeds": misdeeds, "at": at, "stream": stream})
    env = ["--env", "misbehaving_envs:Misbehaving-v0", "--env_kwargs", kwargs, "--eval_episodes", 4]
    return [*env, "--run_dir", run_dir, *SMALL, "--num_gpus", ranks, *flags]


TRAINED, EVALUATED = ("environment", 20), ("evaluation", 5)  # stream, step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misdeed", "when", "problem"),
    [
        ("close descriptors", TRAINED, "closed files and connections that are not its own"),
        ("hang", TRAINED, "did not come back within 1 s"),
        ("nan", TRAINED, "observation is nan"),
        ("hang in C", TRAINED, "within 1 s (--env_timeout) and cannot be interrupted"),
        ("interrupt", TRAINED, "raised KeyboardInterrupt"),
        ("hang", EVALUATED, "did not come back within 1 s"),
        ("nan", EVALUATED, "observation is nan"),
    ],
)
def test_a_fault_of_an_environment_ends_the_job_and_names_rank_number_and_step(
    misdeed, when, problem, tmp_path
):
    run_dir, (stream, at) = tmp_path / "run", when
    flags = ["--env_timeout", 1, "--total_steps", 4 * 4 * 16, "--validate_every", 2]
    words = misbehaving(run_dir, {3: misdeed}, at, *flags, stream=stream)
    code, _, err = finish(start_training(*words))
    line = error_line(err)
    where = f"environment misbehaving_envs:Misbehaving-v0 number 3 at its step {at}: "
    # gloo's thread may end the process before the error line is written
    by_gloo = misdeed == "close descriptors" and "rank 1 (process" in line
    named = line.startswith("error: rank 1: ") and where in line and problem in line
    assert code == 1 and (by_gloo or named), line
    assert [record["iteration"] for record in records(run_dir)] == [1]
    if misdeed == "hang in C":
        assert "in step\n" in (run_dir / "logs" / "rank_1.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misdeed", "ranks"),
    [("close descriptor 1", 1), ("close stdout", 1), ("set the clock", 2), ("end a thread", 1)],
)
def test_an_environment_that_closes_the_output_costs_lines_but_no_training(
    misdeed, ranks, tmp_path
):
    run_dir = tmp_path / "run"
    job = start_training(*misbehaving(run_dir, {3: misdeed}, 20, *THREE_ITERATIONS, ranks=ranks))
    code, _, err = finish(job)
    assert code == 0 and "Traceback" not in err and "error: " not in err, err
    assert (run_dir / "summary.json").exists()
    assert [record["iteration"] for record in records(run_dir)] == [1, 2, 3]
    assert all(0 < record["time/sps"] < 1e6 for record in records(run_dir))


@pytest.mark.slow
def test_with_env_restarts_a_run_continues_even_if_many_hang_longer_than_a_rank_is_waited_for(
    tmp_path,
):
    run_dir = tmp_path / "run"
    misdeeds = {1: "raise", 2: "nan", 4: "hang", 5: "hang", 6: "reward", 7: "shape"}
    flags = ["--env_timeout", 6, "--collective_timeout", 5, "--env_restarts", 1, "--num_envs", 8]
    flags += ["--total_steps", 3 * 8 * 16, "--validate_every", 0]
    code, _, err = finish(start_training(*misbehaving(run_dir, misdeeds, 20, *flags)))
    assert code == 0, err
    assert [line["env/restarts"] for line in records(run_dir)] == [0, 6, 0]
    logs = "".join((run_dir / "logs" / f"rank_{rank}.log").read_text() for rank in range(2))
    for number in misdeeds:
        assert logs.count(f"Misbehaving-v0 number {number} at its step 20: ") == 1


@pytest.mark.slow
def test_with_env_restarts_evaluated_episodes_are_whole_and_their_restarts_counted(tmp_path):
    run_dir = tmp_path / "run"
    misdeeds = {0: "raise", 1: "nan", 2: "hang", 3: "shape"}
    flags = ["--env_timeout", 1, "--env_restarts", 1, "--total_steps", 4 * 4 * 16]
    flags += ["--validate_every", 2]
    job = start_training(*misbehaving(run_dir, misdeeds, 5, *flags, stream="evaluation"))
    code, out, err = finish(job)
    assert code == 0, err
    found = records(run_dir)
    assert [line["env/restarts"] for line in found] == [0] * 4  # of training
    assert [line["valid/env_restarts"] for line in found[1::2]] == [4, 4]
    assert [line["valid/length"] for line in found[1::2]] == [7, 7]
    figures = json.loads((run_dir / "summary.json").read_text())["test"]
    assert (figures["env_restarts"], figures["length"], figures["return"]) == (4, 7, 7)


@pytest.mark.parametrize(
    ("ranks", "flags", "signum", "to"),
    [
        (1, [], signal.SIGTERM, "launcher"),
        pytest.param(1, ["--max_restarts", 1], signal.SIGINT, "launcher", marks=pytest.mark.slow),
        pytest.param(2, ["--max_restarts", 1], signal.SIGTERM, "rank", marks=pytest.mark.slow),
    ],
)
def test_a_signal_during_the_evaluation_ends_the_run_and_the_users_command_hears_of_it_once(
    ranks, flags, signum, to, tmp_path
):
    run_dir = tmp_path / "run"
    note = f"echo $RL_EVENT $RL_EXIT_CODE >> {tmp_path}/events"
    more = ["--env_timeout", 0, "--total_steps", 4 * 16, "--validate_every", 0, "--on_event", note]
    words = misbehaving(run_dir, {3: "hang"}, 5, *more, *flags, stream="evaluation", ranks=ranks)
    job = start_training(*words)
    log = run_dir / "logs" / "rank_0.log"
    wait_until(lambda: log.exists() and "trained to iteration 1" in log.read_text(), job)
    time.sleep(0.5)  # in the evaluation; earlier, the end is the same
    rank = psutil.Process(job.pid).children(recursive=True)[-1]
    (job if to == "launcher" else rank).send_signal(signum)
    code, out, err = finish(job)
    assert code == 128 + signum, (out, err)
    assert (tmp_path / "events").read_text() == f"stopped {128 + signum}\n"
    assert "Traceback" not in err
    assert latest_checkpoint(run_dir).name == "iteration_00000001.pt"


# ---- a callback, core or logger of the user's that leaves or hangs


ODD = {
    "callback": ["--callback", "odd_code:call"],
    "core": ["--policy", "own", "--core", "odd_code:Core"],
    "logger": ["--loggers", "wandb"],
}
ON_2 = ["--num_gpus", 2, "--max_restarts", 1]
ON_3 = ["--num_gpus", 3, "--num_envs", 6, "--batch_size", 6]


@pytest.mark.parametrize(
    ("odd", "flags", "says"),
    [
        ("callback exit -1", [], "callback odd_code:call raised SystemExit: 0"),
        ("core exit 0", ON_2, "rank 0 failed with SystemExit: 0"),
        ("logger exit -1", [], ""),  # it costs its record only
        ("callback hang -1", [], "rank 0: made no progress for 3 s in iteration callback"),
        ("logger hang -1", [], "rank 0: made no progress for 3 s in loggers"),
        ("core hang -1", ON_2[:2], "made no progress for 3 s in update"),
        pytest.param("core hang 2", ON_3, "rank 2", marks=pytest.mark.slow),
    ],
)
def test_code_of_the_user_that_leaves_or_hangs_ends_the_job_as_a_failure_and_is_named(
    odd, flags, says, tmp_path, monkeypatch
):
    monkeypatch.setenv("ODD", odd)
    words = [*RECALL, *THREE_ITERATIONS, "--run_dir", tmp_path / "run", "--eval_episodes", 2]
    words += ["--collective_timeout", 3, "--on_event", f"echo $RL_EVENT > {tmp_path}/event"]
    words += [*ODD[odd.split()[0]], *flags]
    code, _, err = finish(start(REPO / "tests" / "odd_code.py", *words))
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == bool(says) == len(lines), err
    assert says in lines[0] if says else "wandb" in err
    assert (tmp_path / "run/summary.json").exists() != bool(says)
    assert (tmp_path / "event").read_text() == ("failed\n" if says else "finished\n")


# ---- ranks that were started differently


def start_by_hand(monkeypatch, size, *flags, last):
    """Start ranks as another launcher would, the last one with other flags besides."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    variables |= dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], size)
    for rank in range(size):
        for name, value in (variables | dict.fromkeys(["RANK", "LOCAL_RANK"], rank)).items():
            monkeypatch.setenv(name, str(value))
        yield start_training(*flags, *(last if rank == size - 1 else []))


@pytest.mark.parametrize(
    ("size", "last", "says"),
    [
        (2, ["--gamma", 0.9], "rank 1 has gamma 0.9, but rank 0 has 0.99"),
        pytest.param(3, ["--no-normalize_obs"], "rank 2 has norm", marks=pytest.mark.slow),
        pytest.param(2, ["--threads", 1], "", marks=pytest.mark.slow),  # may differ
    ],
)
def test_ranks_with_other_settings_end_together_and_name_the_difference(
    size, last, says, tmp_path, monkeypatch
):
    run_dir = tmp_path / "run"
    flags = [*RECALL, *ON_3[2:], "--total_steps", 96, "--eval_episodes", 2, "--run_dir", run_dir]
    for job in list(start_by_hand(monkeypatch, size, *flags, last=last)):
        code, _, err = finish(job)
        assert code == (2 if says else 0) and says in err, err
    assert (run_dir / "summary.json").exists() != bool(says)
