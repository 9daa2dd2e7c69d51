"""Watchdog verdicts on made-up statuses, two real cases, and stragglers."""

import json
import re
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist
from train_runs import start as start_command
from train_runs import wait_until

from rl_dist.process_group import watchdog
from rl_dist.process_group.clock import IN_A_ROW, Stragglers
from rl_dist.process_group.join import free_port
from rl_dist.process_group.watchdog import CONNECTION, RankStatus, Verdicts, Watchdog

SUM = RankStatus("update", 5, "sum of x", 7)
CONNECTING = RankStatus("start-up", 0, CONNECTION)
GATHERING = RankStatus("start-up", 1, "gather", 1)


def verdict(own, play, looks=25, **options):
    """Return rank 0's verdict and the number of the look that gave it, or ("", 0).

    The watchdog looks every 60 s, a tenth of its timeout. `play(number)` returns the status of rank
    1 at that look; None: rank 1 has not come; "lost": the store does not answer.
    """
    verdicts = Verdicts(0, 2, 600.0, 600.0, **options)
    for number in range(1, looks + 1):
        status = play(number)
        messages = {1: json.dumps(vars(status))} if isinstance(status, RankStatus) else {}
        messages = None if status == "lost" else messages
        if problem := verdicts.look(own, messages, 60.0 * number):
            return problem, number
    return "", 0


@pytest.mark.parametrize(
    ("own", "other", "says"),
    [
        (SUM, RankStatus("update", 9, "agreement", 8), "rank 1, which .* in 'agreement' .coll.* 8"),
        (SUM, RankStatus("collect", 9, "", 6), "rank 1, which made no progress in collect"),
        (SUM, SUM, "do not reach each other"),
        (SUM, None, "rank 1, which never came .--collective_timeout 600"),
        (SUM, "lost", "the store .* does not answer"),
        (CONNECTING, CONNECTING, "do not reach each other.*GLOO_SOCKET_IFNAME"),
        (GATHERING, CONNECTING, "rank 1, .*in 'connection of the ranks'"),
    ],
)
def test_a_rank_that_waits_for_nothing_ends_in_time_and_names_the_cause(own, other, says):
    problem, tenth = verdict(own, lambda number: other)
    assert tenth == 11
    assert re.search(says, problem), problem
    assert own.where in problem


def test_a_slow_rank_that_makes_progress_is_waited_for():
    assert verdict(SUM, lambda n: RankStatus("collect", n // 4, "", 6)) == ("", 0)


@pytest.mark.parametrize(("looks", "watches", "hangs"), [(121, 1, 1), (120, 1, 0), (121, 0, 0)])
def test_own_work_that_hangs_ends_by_the_time_that_the_process_ran(looks, watches, hangs):
    """Each look counts as 5 s, although the clock shows 60 s between two looks.

    So time in which the process is halted does not count.
    """
    own = RankStatus("callback", 5)
    problem, _ = verdict(own, lambda number: None, looks, watches_work=bool(watches))
    assert ("made no progress for 600 s in callback" in problem) == hangs


@pytest.fixture
def ended(monkeypatch):
    """Return a list of the messages with which watchdogs would end this process."""
    problems = []
    monkeypatch.setattr(watchdog, "end_rank", lambda message, **_: problems.append(message))
    return problems


def start(store, status=SUM, rank=0):
    return Watchdog(RankStatus(**vars(status)), store, Verdicts(rank, 2, 1.0))


HOST_OF_STORE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_rank_that_waits_ends_in_time_when_the_machine_of_the_store_vanishes(ended):
    """The connection stays open, but the halted store answers nothing.

    Without the watchdog the rank would wait for the store's own timeout of 100 s.
    """
    port = free_port()
    host = start_command("-c", HOST_OF_STORE.format(port=port))
    assert host.stdout.readline() == "ready\n"
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=100))
    dog = start(store)
    try:
        host.send_signal(signal.SIGSTOP)
        wait_until(lambda: ended, within_s=80.0)
        assert "does not answer" in ended[0]
    finally:
        host.kill()
        host.communicate()
        dog.close()


def test_a_rank_learns_from_a_file_where_another_hangs(tmp_path, ended):
    file = dist.FileStore(str(tmp_path / "store"), 2)
    other, dog = start(file, RankStatus("collect", 5, "", 6), rank=1), start(file)
    wait_until(lambda: ended)
    other.close()
    dog.close()
    assert "rank 1, which made no progress in collect" in ended[0]


@pytest.mark.parametrize(
    ("slow_s", "iterations", "lines"),
    [
        (1.0, "sss", 1),
        (1.0, "ss.ss.ss", 0),  # never slow IN_A_ROW times
        (1.0, "sssssssss", 1),  # reported only once
        (1.0, "sss.sss", 2),
        (0.25, "sssssssss", 0),  # not much slower than the others
    ],
)
def test_a_straggler_is_named_once_until_it_is_well_again(slow_s, iterations, lines):
    assert IN_A_ROW == 3
    stragglers, reported = Stragglers(), []
    for mark in iterations:
        collect = [0.1, slow_s if mark == "s" else 0.15, 0.12]
        reported += stragglers.observe(
            [{"time/collect_s": s, "time/update_own_s": 1.0} for s in collect]
        )
    assert len(reported) == lines
    for line in reported:
        assert "rank 1 is slow in collect: 1 s" in line and "0.11 s (median)" in line


@pytest.mark.parametrize("seconds", [[1.0], [0.001, 0.015]])
def test_one_rank_and_tiny_times_have_no_stragglers(seconds):
    stragglers = Stragglers()
    ranks = [{"time/collect_s": s, "time/update_own_s": 1.0} for s in seconds]
    assert not [line for _ in range(9) for line in stragglers.observe(ranks)]
