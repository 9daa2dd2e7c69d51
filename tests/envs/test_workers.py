"""Environments in worker processes: the same as in place, and named or made again when they end."""

import os
import signal

import psutil
import pytest
import torch
from train_runs import lives, start, wait_until

from agents.network.seeds import ENVIRONMENT_STREAM, stream_seeds
from envs import make_vector_env
from envs.vector.guards import EnvironmentFaultError
from envs.workers import host
from envs.workers.env import WorkerEnv

FIRST, NUM_ENVS = 3, 7
SEEDS = stream_seeds(1, ENVIRONMENT_STREAM, FIRST, NUM_ENVS)
MISBEHAVING = "misbehaving_envs:MisbehavingSaved-v0"


def make(env_id, workers, groups=1, **options):
    options["env_offset"] = FIRST
    if workers:
        return WorkerEnv(env_id, NUM_ENVS, workers, groups, **options)
    return make_vector_env(env_id, NUM_ENVS, **options)


def misbehaving(workers, misdeeds, groups=1, **guard):
    kwargs = {"misdeeds": misdeeds, "at": 3}
    return make(MISBEHAVING, workers, groups, env_kwargs=kwargs, **guard)


def columns(step):
    return [*step[:4], step[4]["final_obs"]]


def play(env, num_steps, first=0):
    """What each step returns; actions depend on the step alone."""
    found = []
    for t in range(first, first + num_steps):
        choice = torch.Generator().manual_seed(t)
        actions = torch.stack(
            [
                torch.randint(env.single_action_space.n, (), generator=choice)
                if not env.single_action_space.shape
                else 3 * torch.randn(env.single_action_space.shape, generator=choice)
                for _ in range(env.num_envs)
            ]
        )
        found.append(columns(env.step(actions)))
    return found


def same(one, other):
    return all(
        torch.equal(a, b)
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left, right, strict=True)
    )


def pids(env):
    return env.process_ids


@pytest.mark.parametrize(
    ("env_id", "options"),
    [(MISBEHAVING, {}), ("Recall-v0", {}), ("Pendulum-v1", {"previous_action": True})],
)
def test_any_number_of_workers_and_groups_steps_as_one_process_does(env_id, options):
    in_place = make(env_id, 0, **options)
    wanted = [[in_place.reset(seed=SEEDS)[0]], *play(in_place, 20)]
    for workers, groups in ((1, 1), (2, 1), (3, 2), (20, 1)):
        env = make(env_id, workers, groups, **options)
        assert env.layout == in_place.layout
        assert len(env.process_ids) == min(workers, NUM_ENVS)
        assert same([[env.reset(seed=SEEDS)[0]], *play(env, 20)], wanted)
        before = pids(env)
        env.close()
        assert not any(map(lives, before))


def test_a_snapshot_goes_on_with_another_number_of_workers():
    env = make("Recall-v0", 3, 2)
    env.reset(seed=SEEDS)
    play(env, 5)
    state = env.get_state()
    wanted = play(env, 9, first=5)
    env.close()
    for workers in (0, 2):
        other = make("Recall-v0", workers)
        other.set_state(state)
        found = other.get_state()
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], state[name]) for name in state)
        assert same(play(other, 9, first=5), wanted)
        other.close()


@pytest.mark.parametrize("misdeed", ["raise", "nan", "four values"])
def test_faults_and_restarts_are_those_of_one_process(misdeed, caplog):
    misdeeds = {4: misdeed, 8: misdeed}
    messages, played, restarts, logged = [], [], [], []
    for workers in (0, 3):
        env = misbehaving(workers, misdeeds)
        env.reset(seed=SEEDS)
        with pytest.raises(EnvironmentFaultError, match="number 4 at its step 3: ") as fault:
            play(env, 3)
        messages.append(str(fault.value))
        env.close()
        env = misbehaving(workers, misdeeds, env_restarts=1)
        env.reset(seed=SEEDS)
        caplog.clear()
        played.append(play(env, 12))
        restarts.append(env.restarts)
        logged.append([record.getMessage() for record in caplog.records])
        env.close()
    assert messages[0].startswith(messages[1])  # which counts others only of one worker
    assert same(*played)
    assert restarts[0] == restarts[1] == [0, 1, 0, 0, 0, 1, 0]
    assert len(logged[0]) == 2 and logged[0] == logged[1]


def test_after_a_fault_a_reset_begins_new_lives():
    env, in_place = misbehaving(3, {4: "raise"}), misbehaving(0, {})
    env.reset(seed=SEEDS)
    with pytest.raises(EnvironmentFaultError):
        play(env, 3)
    other = stream_seeds(2, ENVIRONMENT_STREAM, FIRST, NUM_ENVS)
    assert torch.equal(env.reset(seed=other)[0], in_place.reset(seed=other)[0])
    assert same(play(env, 5), play(in_place, 5))
    env.close()


def test_a_killed_worker_is_one_line_with_its_environments():
    env = make(MISBEHAVING, 3)
    env.reset(seed=SEEDS)
    play(env, 2)
    os.kill(pids(env)[1], signal.SIGKILL)
    line = (
        rf"environment {MISBEHAVING} number one of 5\.\.6 at its step 3: its worker process "
        rf"{pids(env)[1]} \(environments 5\.\.6\) was ended by SIGKILL"
    )
    with pytest.raises(EnvironmentFaultError, match=line) as fault:
        play(env, 1)
    assert "\n" not in str(fault.value)
    env.close()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("misdeed", ["exit 77", "SIGSEGV"])
def test_environments_of_a_worker_that_ends_begin_again_and_others_go_on(misdeed, groups, caplog):
    misdeeds = {5: misdeed}  # of the second worker; in two groups of the third, with 9
    env = misbehaving(3, misdeeds, groups, env_restarts=1)
    quiet = misbehaving(0, {})
    assert torch.equal(env.reset(seed=SEEDS)[0], quiet.reset(seed=SEEDS)[0])
    assert same(play(env, 2), play(quiet, 2))
    found, undisturbed = play(env, 1, 2)[0], play(quiet, 1, 2)[0]
    again = torch.tensor([False, False, True, groups == 1, False, groups == 2, groups == 2])
    if groups == 1:
        again = torch.tensor([False, False, True, True, False, False, False])
    assert torch.equal(torch.tensor(env.restarts), again.long())
    obs, rewards, terminated, truncated, final_obs = found
    assert torch.equal(truncated, again) and not terminated.any()
    assert not rewards[again].any() and not obs[again].any()
    assert torch.equal(final_obs[again][:, 1], torch.full((int(again.sum()),), 2.0))
    for one, other in zip(found, undisturbed, strict=True):
        assert torch.equal(one[~again], other[~again])
    assert "number 5 at its step 3: its worker process" in caplog.text
    assert ("ended with code 77" if misdeed == "exit 77" else "was ended by SIGSEGV") in caplog.text
    assert play(env, 6, 3)[-1][0].isfinite().all()
    env.close()


def test_restarts_of_a_worker_are_counted_and_end():
    env = misbehaving(2, {}, env_restarts=1)
    env.reset(seed=SEEDS)
    for restarts in ([1, 1, 1, 0, 0, 0, 0], None):
        os.kill(pids(env)[0], signal.SIGKILL)
        if restarts:
            play(env, 1)
            assert env.restarts == restarts
    with pytest.raises(EnvironmentFaultError, match=r"SIGKILL \(after 1 restarts, --env_restarts"):
        play(env, 1)
    env.close()


def test_a_worker_that_dies_between_rollouts_begins_again_at_the_next_step():
    env = misbehaving(2, {}, env_restarts=1)
    env.reset(seed=SEEDS)
    play(env, 1)
    os.kill(pids(env)[0], signal.SIGKILL)
    env.take_metrics()  # asked for after every update
    truncated = play(env, 1, 1)[0][3]
    assert truncated.tolist() == [True] * 3 + [False] * 4 and env.restarts == [1] * 3 + [0] * 4
    env.close()


def test_the_truncation_of_an_episode_cut_short_waits_for_its_groups_next_step():
    env = misbehaving(1, {}, groups=2, env_restarts=1)
    env.reset(seed=SEEDS)
    actions = torch.zeros(NUM_ENVS, dtype=torch.int64)
    for group, rows in enumerate(env.groups):
        env.send(actions[rows], group)
    env.recv(0)
    os.kill(pids(env)[0], signal.SIGKILL)
    env.recv(1)  # may have answered before it died
    env.take_metrics()
    first = env.step(actions)[3]
    assert first[env.groups[0]].all() and env.restarts == [1] * NUM_ENVS
    env.close()


def test_a_worker_that_died_before_a_checkpoint_begins_again_for_it():
    env = misbehaving(2, {}, env_restarts=1)
    env.reset(seed=SEEDS)
    play(env, 1)
    os.kill(pids(env)[0], signal.SIGKILL)
    state = env.get_state()
    assert state["guard/restarts"].tolist() == env.restarts == [1] * 3 + [0] * 4
    assert env.take_metrics() == {}
    truncated = play(env, 2, 1)[0][3]  # of the step that follows, whose episodes were cut short
    assert truncated.tolist() == [True] * 3 + [False] * 4
    env.close()


@pytest.mark.parametrize(
    "misdeed",
    ["hang in C", pytest.param("hang in C, holding the interpreter", marks=pytest.mark.slow)],
)
def test_a_call_that_hangs_in_c_is_ended_and_its_environments_begin_again(misdeed, caplog):
    beats = []
    guard = {"env_timeout": 1.0, "env_restarts": 1, "heartbeat": lambda: beats.append(1)}
    env = misbehaving(3, {5: misdeed}, **guard)
    env.reset(seed=SEEDS)
    truncated = play(env, 3)[-1][3]
    assert truncated.tolist() == [False, False, True, True, False, False, False]
    assert "number 5 at its step 3: did not come back within 1 s (--env_timeout)" in caplog.text
    assert misdeed != "hang in C" or len(beats) > 5
    env.close()


def test_workers_end_with_their_rank_however_that_ends():
    code = (
        "import time; from envs.workers.env import WorkerEnv\n"
        f"env = WorkerEnv('{MISBEHAVING}', 2, 2, env_kwargs={{'misdeeds': {{}}}})\n"
        "print(*env.process_ids, flush=True)\n"
        "time.sleep(1000)"
    )
    rank = start("-c", code)
    workers = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(workers) == 2
    for pid in workers:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(pid, signum)  # as schedulers send to all processes: only the rank decides
    assert all(map(lives, workers))
    rank.kill()
    rank.communicate()
    wait_until(lambda: not any(map(lives, workers)))


def test_what_cannot_be_made_is_an_error_of_one_line():
    with pytest.raises(ValueError, match="unknown environment 'Nowhere-v0'"):
        WorkerEnv("Nowhere-v0", 4, 2)
    env = make("Pendulum-v1", 2)
    env.reset(seed=SEEDS)
    with pytest.raises(ValueError, match="actions must be finite"):
        env.step(torch.full((NUM_ENVS, 1), float("nan")))
    assert play(env, 1)[0][0].isfinite().all()
    env.close()


def test_a_halted_host_of_workers_does_not_keep_them_from_ending(monkeypatch):
    env = make(MISBEHAVING, 2)
    monkeypatch.setattr(host, "ANSWER_S", 1.0)
    before = pids(env)
    parent = psutil.Process(before[0]).parent()
    parent.suspend()
    env.close()
    assert not any(map(lives, [*before, parent.pid]))
