"""Test that workers change no results; a dead worker is reported or restarted."""

import itertools
import os
import signal
from types import SimpleNamespace

import psutil
import pytest
import torch
from env_steps import play, same
from train_runs import REPO, lives, run_in, start, wait_until

from agents.learner.network.seeds import ENVIRONMENT_STREAM, stream_seeds
from envs import make_vector_env
from envs.vector.guards import EnvironmentFaultError
from envs.workers.env import WorkerEnv

FIRST, NUM_ENVS = 3, 7
SEEDS = stream_seeds(1, ENVIRONMENT_STREAM, FIRST, NUM_ENVS)
MISBEHAVING = "misbehaving_envs:MisbehavingSaved-v0"


@pytest.fixture
def make():
    """Return a function that makes environments, which are closed after the test.

    They run in `workers` processes; 0 runs them in the process of the test.
    """
    made = []

    def make(workers, misdeeds=None, groups=1, *, env_id=MISBEHAVING, options=None, **guards):
        options, guards["env_offset"] = options or {}, FIRST
        if env_id == MISBEHAVING:
            options["env_kwargs"] = {"misdeeds": misdeeds, "at": 3}
        if workers:
            env = WorkerEnv(NUM_ENVS, workers, groups, env_id=env_id, options=options, **guards)
        else:
            env = make_vector_env(env_id, NUM_ENVS, **options, **guards)
        made.append(env)
        env.start = env.reset(seed=SEEDS)[0]
        return env

    yield make
    for env in made:
        env.close()


def pids(env):
    return [worker.pid for worker in env.workers]


def kill(env, worker):
    os.kill(pids(env)[worker], signal.SIGKILL)


@pytest.mark.parametrize(
    "env_id, options",
    [
        (MISBEHAVING, {}),
        ("Recall-v0", {}),
        ("Pendulum-v1", {"previous_action": True}),
        ("misbehaving_envs:Wide-v0", {}),
        ("agents_ranks:Screens-v0", {}),
        ("agents_ranks:Screens-v0", {"previous_reward": True}),
    ],
)
def test_any_number_of_workers_and_groups_equals_one_process(env_id, options, make):
    in_place = make(0, env_id=env_id, options=options)
    wanted = play(in_place, 20)
    state = in_place.get_state() if in_place.can_snapshot else {}
    later = play(in_place, 9, first=20)
    for workers, groups in ((2, 1), (3, 2), (20, 1)):
        env = make(workers, groups=groups, env_id=env_id, options=options)
        assert env.layout == in_place.layout and env.can_snapshot == in_place.can_snapshot
        assert len(env.workers) == min(groups * workers, NUM_ENVS)
        assert torch.equal(env.start, in_place.start)
        assert same(play(env, 20), wanted)
        if state:
            kept = env.get_state()
            assert kept.keys() == state.keys() and same(kept.values(), state.values())
            env.set_state(state)  # this state was saved without workers
        assert same(play(env, 9, first=20), later)
        before = pids(env)
        env.close()
        assert not any(map(lives, before))


def test_faults_and_restarts_are_the_same_as_in_one_process(make, caplog):
    misdeeds = {4: "raise", 8: "nan"}
    messages, played, logged = [], [], []
    for workers in (0, 3):
        env = make(workers, misdeeds)
        with pytest.raises(EnvironmentFaultError, match="number 4 at its step 3: ") as fault:
            play(env, 3)
        messages.append(str(fault.value))
        env = make(workers, misdeeds, env_restarts=1)
        caplog.clear()
        played.append(play(env, 12))
        assert env.restarts == [0, 1, 0, 0, 0, 1, 0]
        logged.append(caplog.messages.copy())
    assert messages[0] == messages[1] and same(*played)
    assert len(logged[0]) == 2 and logged[0] == logged[1]


def test_workers_check_what_their_batches_return(make):
    env = make(2, env_id="fake_batches:SwappedWalks-v0")
    play(env, 20)
    with pytest.raises(EnvironmentFaultError, match="an end flag is neither 0 nor 1"):
        env.check()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_killed_worker_is_named_once_its_restarts_are_used_up(restarts, make):
    env = make(3, env_restarts=restarts)
    for _ in range(restarts):
        kill(env, 1)
        play(env, 1)
    assert env.restarts == [0, 0, restarts, restarts, 0, 0, 0]
    kill(env, 1)
    line = (
        rf"environment {MISBEHAVING} number 5\.\.6 \(one of these\) at its step {restarts + 1}: "
        rf"its worker process {pids(env)[1]} was ended by SIGKILL \(after {restarts} restarts"
    )
    with pytest.raises(EnvironmentFaultError, match=line) as fault:
        play(env, 1)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    "misdeed, end, groups, again",
    [
        ("exit 77", "code 77", 1, [2, 3]),
        ("SIGSEGV", "SIGSEGV", 2, [2]),
        # The worker reports no progress for more than --env_timeout, but can restart the
        # environment by itself.
        ("hang after a call in C", "did not come back within 1 s (--env_timeout)", 1, [2]),
        ("hang in C", "did not come back within 1 s (--env_timeout)", 1, [2, 3]),
        ("hang in C, holding the interpreter", "and was killed (--env_timeout)", 1, [2, 3]),
    ],
)
def test_environments_of_a_dead_or_hanging_worker_restart_and_others_continue(
    misdeed, end, groups, again, make, caplog, monkeypatch
):
    if "holding" in misdeed:  # give the worker no time to end by itself
        monkeypatch.setattr("envs.workers.env.GRACE_S", 0.0)
    beats = []
    guards = {"env_restarts": 1, "heartbeat": lambda: beats.append(1)}
    if "hang" in misdeed:
        guards["env_timeout"] = 1.0
    env = make(3, {5: misdeed}, groups, **guards)
    quiet = make(0)
    assert same(play(env, 2), play(quiet, 2))
    outcome, undisturbed = play(env, 1, first=2), play(quiet, 1, first=2)
    again = torch.tensor([row in again for row in range(NUM_ENVS)])
    assert env.restarts == again.int().tolist()
    obs, rewards, terminated, truncated, final_obs = (column[0] for column in outcome)
    assert torch.equal(truncated, again) and not terminated.any()
    assert not rewards[again].any() and not obs[again].any()
    assert (final_obs[again][:, 1] == 2.0).all()
    assert same([c[:, ~again] for c in outcome], [c[:, ~again] for c in undisturbed])
    assert "number 5 at its step 3: " in caplog.text and end in caplog.text
    assert misdeed != "hang in C" or len(beats) > 1  # the rank sends heartbeats while it waits
    assert play(env, 6, first=3)[0].isfinite().all()


def test_a_worker_that_makes_progress_is_not_killed_for_the_sum_of_its_calls(make, monkeypatch):
    env = make(1, dict.fromkeys(range(FIRST, FIRST + NUM_ENVS), "take a while"), env_timeout=5.0)
    status = env.workers[0].status
    # For the rank, each call takes 6 s. It kills a worker without progress after 11 s.
    clock = SimpleNamespace(monotonic=lambda: 6.0 * float(status["beats"]))
    monkeypatch.setattr("envs.workers.env.time", clock)
    monkeypatch.setattr("envs.workers.env.LOOK_S", 0.02)
    play(env, 3)
    assert env.restarts == [0] * NUM_ENVS


def test_environments_may_take_longer_to_be_made_than_a_step(monkeypatch):
    with monkeypatch.context() as patch:
        clock = SimpleNamespace(monotonic=itertools.count(0, 1000).__next__)
        patch.setattr("envs.workers.env.time", clock)  # 1000 s pass from look to look
        patch.setattr("envs.workers.env.LOOK_S", 0.001)
        env = WorkerEnv(2, 1, env_id=MISBEHAVING, env_timeout=1.0, env_restarts=1)
    env.close()
    assert env.restarts == [0, 0]


@pytest.mark.parametrize("question", ["take_metrics", "get_state"])
def test_a_worker_that_dies_between_rollouts_restarts_at_the_next_step(question, make):
    env = make(2, env_restarts=1)
    play(env, 1)
    kill(env, 0)
    # Training makes this call after an update or when it saves a checkpoint.
    answer = getattr(env, question)()
    if question == "get_state":
        assert answer["life/restarts"].tolist() == [1] * 3 + [0] * 4
    truncated = play(env, 1, first=1)[3][0]
    assert truncated.tolist() == [True] * 3 + [False] * 4 and env.restarts == [1] * 3 + [0] * 4


def test_workers_end_when_their_rank_is_killed():
    code = (
        "import time; from envs.workers.env import WorkerEnv\n"
        "env = WorkerEnv(2, 2, env_id='Recall-v0')\n"
        "print(*[worker.pid for worker in env.workers], flush=True)\n"
        "time.sleep(1000)"
    )
    rank = start("-c", code)
    workers = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(workers) == 2
    for pid in workers:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            # schedulers send signals to all processes; workers must ignore them
            os.kill(pid, signum)
    assert all(map(lives, workers))
    rank.kill()
    rank.communicate()
    wait_until(lambda: not any(map(lives, workers)))


def test_workers_outlive_the_thread_that_started_the_first_ones():
    code = (
        "import threading; from envs.workers.env import WorkerEnv\n"
        "def run():\n"
        "    env = WorkerEnv(2, 2, env_id='Recall-v0'); env.reset(seed=[1, 2]); env.close()\n"
        "thread = threading.Thread(target=run); thread.start(); thread.join()\n"
        "run(); print('done')"
    )
    assert run_in(REPO, "-c", code)[0] == "done\n"


def test_a_process_that_starts_workers_is_replaced_when_it_dies(make):
    def kill_host():
        psutil.Process(pids(env)[0]).parent().kill()
        wait_until(lambda: not any(map(lives, pids(env))))

    env = make(2, env_restarts=1)
    play(env, 1)
    kill_host()
    assert play(env, 1, first=1)[3][0].all() and env.restarts == [1] * NUM_ENVS
    kill_host()
    assert play(make(2), 1)[0].isfinite().all()  # the next training in this process


def test_an_environment_that_cannot_be_made_is_an_error_of_one_line():
    with pytest.raises(ValueError, match="'Nowhere-v0' cannot be made"):
        WorkerEnv(4, 2, env_id="Nowhere-v0")


def test_an_environment_that_cannot_be_made_leaves_no_traceback_of_a_worker():
    code = (
        "from envs.workers.env import WorkerEnv\n"
        "try: WorkerEnv(2, 1, env_id='nowhere:X-v0')\nexcept ValueError as error: print(error)"
    )
    out, err = run_in(REPO, "-c", code)
    assert "nowhere" in out and not err


def test_metrics_are_summed_over_the_workers(make):
    env = make(2, env_id="misbehaving_envs:Measured-v0")
    play(env, 2)
    assert env.take_metrics() == {"number": (14.0, 14)}
