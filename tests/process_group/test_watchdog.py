"""The watchdog, with made-up statuses and a real store; reports of stragglers."""

import json
import re
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port
from train_runs import start, wait_until

from rl_dist.process_group import watchdog
from rl_dist.process_group.clock import IN_A_ROW, Stragglers
from rl_dist.process_group.watchdog import CONNECTION, RankStatus, Verdicts, Watchdog

SUM = RankStatus("update", 5, "sum of x", 7)
CONNECTING = RankStatus("start-up", 0, CONNECTION)
GATHERING = RankStatus("start-up", 1, "gather", 1)


def verdict(own, play, looks=25, **options):
    """Return the verdict of rank 0's watchdog and the number of the decisive check.

    Without a verdict, return ("", 0). The watchdog checks every 60 s, a tenth of its timeout.
    `play(number)` returns the status of rank 1 at that check, None if rank 1 has not arrived, or
    "lost" if the store does not answer.
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
    "own, other, says",
    [
        (SUM, RankStatus("update", 9, "agreement", 8), "rank 1, which .* in 'agreement' .coll.* 8"),
        (SUM, RankStatus("collect", 9, "", 6), "rank 1, which made no progress in collect"),
        (SUM, SUM, "cannot reach each other"),
        (SUM, None, "rank 1, which never came .--collective_timeout 600"),
        (SUM, "lost", "the store does not answer"),
        (CONNECTING, CONNECTING, "cannot reach each other.*GLOO_SOCKET_IFNAME"),
        (GATHERING, CONNECTING, "rank 1, .*in 'connection of the ranks'"),
    ],
)
def test_a_rank_that_waits_in_a_collective_ends_in_time_and_names_the_cause(own, other, says):
    problem, tenth = verdict(own, lambda number: other)
    assert tenth == 11
    assert re.search(says, problem), problem
    assert own.where in problem


def test_a_slow_rank_that_makes_progress_is_waited_for():
    assert verdict(SUM, lambda n: RankStatus("collect", n // 4, "", 6)) == ("", 0)


@pytest.mark.parametrize("looks, watches, hangs", [(121, 1, 1), (120, 1, 0), (121, 0, 0)])
def test_work_that_hangs_is_ended_after_a_time_in_which_the_process_ran(looks, watches, hangs):
    """The clock advances 60 s between checks, but only 5 s of them count as work.

    So the time in which a process is halted hardly counts.
    """
    own = RankStatus("callback", 5)
    problem, _ = verdict(own, lambda number: None, looks, watches_work=bool(watches))
    assert ("made no progress for 600 s in callback" in problem) == hangs


HOST_OF_STORE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_waiting_rank_ends_in_time_if_the_machine_of_the_store_vanishes(monkeypatch):
    """The connection to the halted store stays open, but the store does not answer.

    Without the watchdog, the rank would wait for 100 s, the timeout of the store.
    """
    ended = []
    monkeypatch.setattr(watchdog, "end_rank", lambda message, **_: ended.append(message))
    port = get_free_port()
    host = start("-c", HOST_OF_STORE.format(port=port))
    assert host.stdout.readline() == "ready\n"
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=100))
    dog = Watchdog(SUM, store, Verdicts(0, 2, 1.0))
    try:
        host.send_signal(signal.SIGSTOP)
        wait_until(lambda: ended, within_s=80.0)
        assert "does not answer" in ended[0]
    finally:
        host.kill()
        host.communicate()
        dog.close()


USUAL = [0.1, 0.15, 0.12]
SLOW = [0.1, 1.0, 0.12]


@pytest.mark.parametrize(
    "slow, iterations, lines",
    [
        (SLOW, "sss", 1),
        (SLOW, "ss.ss.ss", 0),  # never slow in 3 iterations in a row
        (SLOW, "sssssssss", 1),  # reported only once
        (SLOW, "sss.sss", 2),
        ([0.1, 0.25, 0.12], "sssssssss", 0),  # not much slower than the others
        ([1.0], "sssssssss", 0),
        ([0.001, 0.015], "sssssssss", 0),  # differences this short do not count
    ],
)
def test_a_straggler_is_named_once_until_it_recovers(slow, iterations, lines):
    assert IN_A_ROW == 3
    stragglers, reported = Stragglers(), []
    for mark in iterations:
        times = slow if mark == "s" else USUAL
        reported += stragglers.observe(
            [{"time/collect_s": s, "time/update_own_s": 1.0} for s in times]
        )
    assert len(reported) == lines
    for line in reported:
        assert "rank 1 is slow in collect: 1 s" in line and "0.11 s (median)" in line
