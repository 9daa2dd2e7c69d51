"""Starting, stopping and failing: whatever happens, one clear message and no process left."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import rl_dist_ranks
import torch

from rl_dist.errors import UserError
from rl_dist.hardware.host_memory import available_cores
from rl_dist.launch.launcher import LaunchConfig, launch, resolve
from rl_dist.process_group.world import close_world, open_world, stop_flag, threads_per_rank

REPO = Path(__file__).parents[2]


def start_job(mode, out_dir, command=(sys.executable,)):
    """Start a two-rank job in its own process group and wait until both ranks work."""
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    job = subprocess.Popen(
        [*command, str(REPO / "tests/rl_dist_ranks.py"), mode, str(out_dir)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline_s = time.monotonic() + 90
    pid_files = [Path(out_dir, f"pid_{rank}") for rank in range(2)]
    while not all(path.exists() and path.read_text() for path in pid_files):
        assert job.poll() is None and time.monotonic() < deadline_s, job.communicate()
        time.sleep(0.05)
    return job, [int(path.read_text()) for path in pid_files]


def assert_all_gone(pids, within_s=10.0):
    deadline_s = time.monotonic() + within_s
    while alive := [pid for pid in pids if psutil.pid_exists(pid) and not is_zombie(pid)]:
        assert time.monotonic() < deadline_s, f"still running: {alive}"
        time.sleep(0.05)


def is_zombie(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def family(pid):
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


@pytest.mark.parametrize(
    ("send", "signum"),
    [
        pytest.param(lambda job, ranks, s: job.send_signal(s), signal.SIGTERM, id="term_to_launcher"),
        pytest.param(lambda job, ranks, s: os.killpg(job.pid, s), signal.SIGINT, id="ctrl_c_to_the_group"),
        pytest.param(
            lambda job, ranks, s: os.kill(ranks[1], s),
            signal.SIGUSR1,
            id="usr1_to_one_rank",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda job, ranks, s: job.send_signal(s),
            signal.SIGINT,
            id="int_to_launcher",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda job, ranks, s: job.send_signal(s),
            signal.SIGUSR1,
            id="usr1_to_launcher",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda job, ranks, s: os.kill(ranks[0], s),
            signal.SIGTERM,
            id="term_to_main_rank",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda job, ranks, s: os.kill(ranks[1], s),
            signal.SIGINT,
            id="int_to_one_rank",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_stop_signal_lets_all_ranks_save_and_leaves_no_process(tmp_path, send, signum):
    job, ranks = start_job("loop", tmp_path)
    everyone = family(job.pid)
    send(job, ranks, signum)
    stdout, stderr = job.communicate(timeout=30)
    assert job.returncode == 128 + signum, stderr
    assert (tmp_path / "saved.json").read_text() == f'{{"signum": {int(signum)}}}'
    assert "Traceback" not in stderr and "Error" not in stderr, stderr
    assert_all_gone(everyone)


def test_ranks_leave_when_their_launcher_is_killed(tmp_path):
    job, ranks = start_job("loop", tmp_path)
    everyone = family(job.pid)
    job.kill()
    job.wait(timeout=10)
    assert_all_gone([*ranks, *everyone])
    assert (tmp_path / "saved.json").exists()
    job.communicate()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_even_ranks_that_hang(tmp_path):
    job, _ = start_job("hang", tmp_path)
    everyone = family(job.pid)
    os.killpg(job.pid, signal.SIGINT)
    time.sleep(1.0)
    assert job.poll() is None
    os.killpg(job.pid, signal.SIGINT)
    _, stderr = job.communicate(timeout=10)
    assert job.returncode == 130
    assert "stopped at once" in stderr and "Traceback" not in stderr
    assert_all_gone(everyone)


@pytest.mark.slow
def test_ranks_of_torchrun_are_adopted(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    job, ranks = start_job("adopt", tmp_path, torchrun)
    assert job.wait(timeout=60) == 0, job.communicate()
    assert_all_gone(ranks)
    job.communicate()


def test_a_failing_rank_ends_the_job_with_its_traceback_and_rank_once(tmp_path, capfd):
    assert launch(rl_dist_ranks.loop, (str(tmp_path), "error"), num_ranks=2) == 1
    stderr = capfd.readouterr().err
    assert stderr.count("RuntimeError: the roof is on fire") == 1
    assert stderr.count("Traceback") == 1
    assert "rank 1 failed" in stderr
    assert "the roof is on fire" in (tmp_path / "logs/rank_1.log").read_text()
    assert_all_gone([int((tmp_path / f"pid_{rank}").read_text()) for rank in range(2)])


def test_a_users_mistake_found_by_one_rank_is_one_line(tmp_path, capfd):
    assert launch(rl_dist_ranks.loop, (str(tmp_path), "user"), num_ranks=2) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "Gloo" not in line]  # it may see the end first
    assert lines == ["error: num_envs must be at least 1, got 0"]


@pytest.mark.slow
def test_ranks_that_hang_while_another_fails_are_ended_soon(tmp_path, capfd):
    started_s = time.monotonic()
    assert launch(rl_dist_ranks.hang, (str(tmp_path), 1), num_ranks=2) == 1
    assert time.monotonic() - started_s < 30
    assert "rank 1 failed" in capfd.readouterr().err
    assert_all_gone([int((tmp_path / f"pid_{rank}").read_text()) for rank in range(2)])


WAYS = {"0": "code 0", "1": "code 1", "77": "code 77", "SIGSEGV": "SIGSEGV", "SIGKILL": "SIGKILL", "SIGABRT": "SIGABRT"}
DEATHS = [(way, victim, ranks) for way in WAYS for ranks in (1, 2, 3) for victim in {0, ranks - 1}]
QUICK_DEATHS = [("0", 1, 2), ("SIGSEGV", 0, 2)]


@pytest.mark.parametrize(
    ("way", "victim", "ranks"),
    [pytest.param(*death, marks=() if death in QUICK_DEATHS else pytest.mark.slow) for death in DEATHS],
)
def test_a_rank_that_dies_without_a_report_is_named_and_started_again_if_asked(way, victim, ranks, tmp_path, capfd):
    if ranks > 1:  # alone it runs in the command's process, see test_supervisor.py
        assert launch(rl_dist_ranks.loop, (str(tmp_path), way, victim), ranks) == 1
        told = [line for line in capfd.readouterr().err.splitlines() if "error" in line]  # gloo may complain first
        assert len(told) == 1 and re.fullmatch(rf"error: rank {victim} \(process \d+\) .*{WAYS[way]}.*", told[0])
        assert_all_gone([int((tmp_path / f"pid_{rank}").read_text()) for rank in range(ranks)])
    assert launch(rl_dist_ranks.live_twice, (str(tmp_path), way, victim), ranks, max_restarts=1) == 0
    assert re.search(rf"^rank {victim} \(.*{WAYS[way]}.*: restart 1 of 1$", capfd.readouterr().err, re.MULTILINE)


def test_a_failure_with_a_giant_message_is_told_as_what_it_is(capfd):
    assert launch(rl_dist_ranks.fail_at_length, (), num_ranks=2) == 1
    stderr = capfd.readouterr().err
    assert re.search("rank [01] failed", stderr) and "without a report" not in stderr


def test_a_rank_that_is_still_ending_itself_is_no_riddle(capfd):
    assert launch(rl_dist_ranks.end_slowly, (), num_ranks=2) == 1
    assert capfd.readouterr().err == "error: rank 0: too late\n"


def test_no_signal_meets_a_rank_before_its_handlers_are_set():
    code = "import mask_when_imported, rl_dist.launch.launcher as it; exit(it.launch(mask_when_imported.check, (), 2))"
    environment = os.environ | {"PYTHONPATH": f"{REPO}:{REPO / 'tests'}"}  # a new process: none has started a rank yet
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120).returncode == 0


def test_the_rank_that_failed_is_the_cause_and_not_the_one_that_missed_it_first(tmp_path, capfd):
    assert launch(rl_dist_ranks.close_slowly, (str(tmp_path),), num_ranks=2) == 1
    stderr = capfd.readouterr().err
    assert "rank 1 failed" in stderr and "the roof is on fire" in stderr and "rank 0" not in stderr


def test_one_rank_runs_in_this_process():
    assert launch(lambda pid: 0 if pid == os.getpid() else 1, (os.getpid(),), num_ranks=1) == 0


def test_ranks_started_by_torchrun_run_in_their_process(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert launch(lambda: 7, (), num_ranks=2) == 7


def test_errors_of_a_single_rank_have_the_same_exit_codes(capfd):
    def fail(error):
        raise error

    assert launch(fail, (UserError("too many cooks"),), num_ranks=1) == 2
    assert launch(fail, (UserError("no disk", exit_code=1),), num_ranks=1) == 1
    assert launch(fail, (ValueError("two\nlines"),), num_ranks=1) == 2
    assert capfd.readouterr().err == "error: too many cooks\nerror: no disk\nerror: two lines\n"
    assert launch(fail, (KeyError("lost"),), num_ranks=1) == 1
    assert "Traceback" in capfd.readouterr().err
    assert launch(sys.exit, (3,), num_ranks=1) == 3


def test_a_stop_signal_only_sets_a_flag_and_handlers_are_put_back():
    def stopped_by(signum):
        os.kill(os.getpid(), signum)
        return stop_flag.signum

    before = signal.getsignal(signal.SIGTERM)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        assert launch(stopped_by, (signum,), num_ranks=1) == signum
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_world_of_one_rank_has_an_open_process_group():
    world = open_world("cpu")
    try:
        assert torch.distributed.is_initialized()
        assert (world.rank, world.size, world.main, world.backend) == (0, 1, True, "gloo")
    finally:
        close_world(world)
    assert not torch.distributed.is_initialized()
    close_world(world)


def test_threads_are_the_cores_shared_out_and_never_more_than_asked_for(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_per_rank(1) == available_cores()
    assert threads_per_rank(10_000) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_per_rank(1) == 1
    assert "OMP" not in resolve(LaunchConfig(device="cpu")).message
    for limit in ("0", "abc", "-4"):
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
        assert threads_per_rank(1) == available_cores()
        assert f"OMP_NUM_THREADS is '{limit}', no number of threads" in resolve(LaunchConfig(device="cpu")).message


@pytest.fixture
def machine(monkeypatch):
    def with_gpus(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return with_gpus


@pytest.mark.parametrize(
    ("gpus", "flags", "expected"),
    [
        (0, {}, (1, "cpu")),
        (0, {"num_gpus": 0}, (1, "cpu")),
        (0, {"num_gpus": 4}, (4, "cpu")),
        (2, {}, (2, "cuda")),
        (2, {"num_gpus": 1}, (1, "cuda")),
        (2, {"num_gpus": 0}, (1, "cpu")),
        (2, {"num_gpus": 4, "device": "cpu"}, (4, "cpu")),
        (2, {"device": "cpu"}, (1, "cpu")),
    ],
)
def test_ranks_and_device_follow_the_machine(machine, gpus, flags, expected):
    machine(gpus)
    resolved = resolve(LaunchConfig(**flags))
    assert (resolved.num_ranks, resolved.device_type) == expected
    assert "\n" not in resolved.message


@pytest.mark.parametrize(
    ("gpus", "flags", "message"),
    [
        (2, {"num_gpus": 3}, "has 2"),
        (0, {"device": "cuda"}, "no CUDA GPU"),
        (2, {"device": "cuda", "num_gpus": 0}, "contradicts"),
        (0, {"num_gpus": 2, "strategy": "none"}, "one rank only"),
        (0, {"num_gpus": 1, "strategy": "hybrid"}, "over several ranks, got 1"),
        (0, {"num_gpus": 4, "strategy": "hybrid", "shard_size": 3}, "does not divide 4 ranks; use --shard_size 2, 4"),
        (0, {"num_gpus": 2, "shard_size": 2}, "does nothing with strategy default: use --strategy hybrid"),
    ],
)
def test_what_the_machine_cannot_do_is_an_error(machine, gpus, flags, message):
    machine(gpus)
    with pytest.raises(ValueError, match=message):
        resolve(LaunchConfig(**flags))


def test_the_missing_gpu_is_said(machine):
    machine(0)
    assert "no CUDA GPU found" in resolve(LaunchConfig(num_gpus=2)).message


def test_num_gpus_against_torchrun_is_an_error(machine, monkeypatch):
    machine(0)
    variables = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert resolve(LaunchConfig()).num_ranks == 4
    with pytest.raises(ValueError, match="started 4 ranks"):
        resolve(LaunchConfig(num_gpus=3))


@pytest.mark.parametrize("flags", [{"num_gpus": -2}, {"device": "tpu"}, {"precision": "fp8"}])
def test_launch_flags_out_of_range_are_refused(flags):
    with pytest.raises(ValueError, match=next(iter(flags))):
        LaunchConfig(**flags)
