"""Verdicts of the watchdog on ranks that are played by the test, and the rule for stragglers."""

import json
import signal
import time
from dataclasses import replace
from datetime import timedelta
from statistics import median
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from train_runs import start as start_command
from train_runs import wait_until

from rl_dist.process_group import watchdog
from rl_dist.process_group.addresses import free_port
from rl_dist.process_group.clock import IN_A_ROW, Stragglers, median_of_others
from rl_dist.process_group.watchdog import CONNECTION, RankStatus, Watchdog

CONNECTING, GATHERING = (
    RankStatus("start-up", 0, CONNECTION),
    RankStatus("start-up", 1, "gather", 1),
)
WAITING = "in 'sum of x' (collective 7, update)"


@pytest.fixture
def ended(monkeypatch):
    """Why the watchdogs of this process have ended it, if they had."""
    found = []
    monkeypatch.setattr(watchdog, "end_rank", lambda message, **_: found.append(message))
    return found


def start(store, rank=0, timeout_s=1.0, own=None):
    """The watchdog of a rank of two that waits in a collective."""
    status = replace(own or RankStatus("update", 5, "sum of x", 7))
    return Watchdog(status, store, rank, 2, timeout_s)


def problem(monkeypatch, play, own=None):
    """What rank 0 finds, and in which tenth of its timeout, of 600 s on a clock of the test's.

    `play(number)` is the status of rank 1; None: it has not come.
    """
    now = [0.0]
    monkeypatch.setattr(watchdog, "PERIOD_S", 60.0)  # its thread sleeps
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    store = dist.HashStore()
    messages = dist.PrefixStore("doing", store)
    dog = start(store, timeout_s=600.0, own=own)
    for number in range(1, 26):
        now[0] += dog.period_s
        if status := play(number):
            messages.set("1", json.dumps([number, vars(status)]))
        dog._publish()
        if found := dog._look():
            break
    dog.close()
    return found, number


def test_a_rank_that_waits_for_one_that_has_left_is_ended_by_its_own_thread(ended):
    store = dist.HashStore()
    gone = RankStatus("left", 9, "", 6)
    dist.PrefixStore("doing", store).set("1", json.dumps([1, vars(gone)]))
    dog = start(store)
    wait_until(lambda: ended)
    dog.close()
    assert ended[0] == f"waits {WAITING} for rank 1, which has left after collective 6"


HOST_OF_STORE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_rank_that_waits_ends_in_time_when_the_machine_of_the_store_vanishes(ended):
    """No connection breaks: nobody answers, for as long as the store's own timeout."""
    port = free_port()
    host = start_command("-c", HOST_OF_STORE.format(port=port))
    assert host.stdout.readline() == "ready\n"
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=100))
    dog = start(store)
    try:
        host.send_signal(signal.SIGSTOP)
        wait_until(lambda: ended, within_s=80.0)
        assert f"{WAITING}, and the store that would say for whom does not answer" in ended[0]
    finally:
        host.kill()
        host.communicate()
        dog.close()


@pytest.mark.parametrize(
    ("status", "expected", "tenth"),
    [
        (
            RankStatus("update", 9, "agreement", 8),
            "the ranks made different collective calls and wait for each other: "
            f"rank 0 waits {WAITING}; rank 1 waits in 'agreement' (collective 8, update)",
            3,
        ),
        (
            RankStatus("left", 9, "", 6),
            f"waits {WAITING} for rank 1, which has left after collective 6",
            1,
        ),
    ],
    ids=["another call", "left"],
)
def test_ranks_that_wait_in_different_places_end_long_before_the_timeout(
    status, expected, tenth, monkeypatch
):
    assert problem(monkeypatch, lambda number: status) == (expected, tenth)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (
            RankStatus("collect", 9, "", 6),
            " for rank 1, which made no progress in collect, outside any collective "
            "(--collective_timeout 600)",
        ),
        (
            RankStatus("update", 9, "sum of x", 7),
            ", as all other ranks do: their connection is broken",
        ),
    ],
    ids=["elsewhere", "in the same place"],
)
def test_a_rank_that_makes_no_progress_is_named(status, expected, monkeypatch):
    found = problem(monkeypatch, lambda number: status)
    assert found == (f"waited 600 s {WAITING}{expected}", 11)


@pytest.mark.parametrize(
    ("own", "comes", "connects", "tenth", "names"),
    [
        (CONNECTING, 1, 99, 3, "0, 1 did not reach"),
        (CONNECTING, 7, 99, 9, "0, 1 did not reach"),  # a slow start is waited for
        (GATHERING, 1, 99, 3, "1 did not reach"),  # and is no other collective call
        (GATHERING, 1, 2, 11, "waited 600 s in 'gather'"),
    ],
)
def test_ranks_that_have_come_but_do_not_reach_each_other_are_named_soon(
    own, comes, connects, tenth, names, monkeypatch
):
    def play(number):
        if number < comes:
            return None
        return CONNECTING if number < connects else GATHERING

    found, when = problem(monkeypatch, play, own)
    assert names in found and when == tenth


@pytest.mark.parametrize(("ticks", "progress", "ends"), [(10, 0, 1), (9, 0, 0), (40, 1, 0)])
def test_own_work_that_makes_no_progress_ends_by_the_time_that_the_process_ran(
    ticks, progress, ends, monkeypatch
):
    """Its period is a tenth of the timeout; the clock jumps, as while the process is halted."""
    monkeypatch.setattr(watchdog, "PERIOD_S", 60.0)  # its thread sleeps
    status = RankStatus("callback", 5)
    dog = Watchdog(status, dist.HashStore(), 0, 1, 600.0, watches_work=True)
    for _ in range(ticks + 1):
        status.progress += progress
        dog._own_since_s -= 10_000
        dog._publish()
    found = dog._hanging_work()
    dog.close()
    assert ("in callback, outside" in found) == ends


def test_a_slow_rank_that_goes_on_is_waited_for(monkeypatch):
    found, _ = problem(monkeypatch, lambda number: RankStatus("collect", number // 4, "", 6))
    assert found == ""


def test_a_rank_that_left_after_the_call_is_no_error(ended):
    store = dist.HashStore()
    other = start(store, rank=1)
    dog = start(store)
    other.close()
    time.sleep(0.3)  # three periods
    dog.close()
    status = json.loads(dist.PrefixStore("doing", store).get("1"))[1]
    assert not ended and status["phase"] == "left"


def test_what_ranks_tell_each_other_through_files_takes_no_more_room_with_time(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dogs = [Watchdog(RankStatus(), store, rank, 2, 600.0) for rank in (0, 1)]
    sizes = []
    for number in range(100):
        dogs[1].doing.progress = 10**9 + number
        for dog in dogs:
            dog._publish()
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    assert sizes[-1] - sizes[20] < 10
    dogs[0].doing.place = "sum of x"
    dogs[0]._publish()
    assert dogs[0]._look() == "" and dogs[0]._seen[1].status.progress == 10**9 + 99
    for dog in dogs:
        dog.close()


def entries(collect, update):
    """Metrics of every rank."""
    pairs = zip(collect, update, strict=True)
    return [{"time/collect_s": one, "time/update_own_s": other} for one, other in pairs]


@pytest.mark.parametrize(
    ("slow", "lines"),
    [
        ("sss", 1),
        ("ss.ss.ss", 0),  # never IN_A_ROW
        ("sssssssss", 1),  # once
        ("sss..sss", 1),  # not well again in between
        ("sss...sss", 2),
    ],
)
def test_a_straggler_is_named_once_until_it_is_well_again(slow, lines):
    assert IN_A_ROW == 3
    stragglers = Stragglers()
    found = []
    for mark in slow:
        collect = [0.1, 1.0 if mark == "s" else 0.15, 0.12]
        found += stragglers.observe(entries(collect, [1.0, 1.1, 0.9]))
    assert len(found) == lines
    for line in found:
        assert "rank 1 is slow in collect: 1 s" in line and "0.11 s (median)" in line


@pytest.mark.parametrize("seconds", [[1.0], [0.001, 0.015], [0.5, 1.0, 0.6]])
def test_one_rank_tiny_times_and_small_differences_are_no_stragglers(seconds):
    stragglers = Stragglers()
    ranks = entries(seconds, [1.0] * len(seconds))
    assert not [line for _ in range(9) for line in stragglers.observe(ranks)]


@pytest.mark.parametrize("seconds", [[3.0], [2.0, 1.0], [1.0, 1.0, 2.0], [4.0, 1.0, 3.0, 2.0]])
def test_the_median_of_the_others_leaves_one_out(seconds):
    for number, own in enumerate(seconds):
        others = seconds[:number] + seconds[number + 1 :] or [own]
        assert median_of_others(sorted(seconds), own) == median(others)
