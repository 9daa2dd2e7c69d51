"""Verdicts of the watchdog on ranks that are played by the test, and the rule for stragglers."""

import json
import time

import pytest
import torch.distributed as dist

from rl_dist.process_group import watchdog
from rl_dist.process_group.watchdog import Doing, Watchdog
from rl_dist.telemetry.stragglers import IN_A_ROW, Stragglers


def verdict(monkeypatch, play, timeout_s=2.0):
    """What rank 0 of 2, which waits in 'sum of x', ends with; `play(beat number)` says what rank 1 tells."""
    told = []
    monkeypatch.setattr(watchdog, "end_rank", lambda message, **_: told.append(message))
    store = dist.HashStore()
    beats = dist.PrefixStore("doing", store)
    dog = Watchdog(Doing("update", 5, "sum of x", 7), store, 0, 2, timeout_s)
    started_s, number = time.monotonic(), 0
    while not told and time.monotonic() - started_s < 2.5 * timeout_s:
        number += 1
        beats.set("1", json.dumps([number, vars(play(number))]))
        time.sleep(dog.period_s)
    dog.close()
    return told[0] if told else "", time.monotonic() - started_s


def test_ranks_that_wait_in_different_places_end_long_before_the_timeout(monkeypatch):
    told, seconds = verdict(monkeypatch, lambda number: Doing("update", 9, "agreement", 8), timeout_s=5.0)
    assert told == (
        "the ranks made different collective calls and wait for each other: rank 0 waits in 'sum of x' "
        "(collective 7, update); rank 1 waits in 'agreement' (collective 8, update)"
    )
    assert seconds < 5.0


def test_a_rank_that_makes_no_progress_is_named(monkeypatch):
    told, _ = verdict(monkeypatch, lambda number: Doing("collect", 9, "", 6))
    assert told.startswith("waited ") and "in 'sum of x' (collective 7, update) for rank 1, which made no prog" in told
    assert told.endswith("in collect, outside any collective (--collective_timeout 2)")


def test_a_rank_that_left_before_the_call_is_not_waited_for(monkeypatch):
    told, seconds = verdict(monkeypatch, lambda number: Doing("left", 9, "", 6), timeout_s=20.0)
    assert told == "waits in 'sum of x' (collective 7, update) for rank 1, which has left after collective 6"
    assert seconds < 10.0


def test_a_rank_that_left_after_the_call_is_no_error(monkeypatch):
    store, told = dist.HashStore(), []
    monkeypatch.setattr(watchdog, "end_rank", lambda message, **_: told.append(message))
    other = Watchdog(Doing("update", 9, "", 7), store, 1, 2, 1.0)
    dog = Watchdog(Doing("update", 5, "sum of x", 7), store, 0, 2, 1.0)
    other.close()
    time.sleep(0.5)
    dog.close()
    assert not told and json.loads(dist.PrefixStore("doing", store).get("1"))[1]["phase"] == "left"


def test_what_ranks_tell_each_other_through_files_takes_no_more_room_with_time(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dogs = [Watchdog(Doing(), store, rank, 2, 600.0) for rank in (0, 1)]
    sizes = []
    for number in range(100):
        dogs[1].doing.progress = 10**9 + number
        for dog in dogs:
            dog._beat()
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    assert sizes[-1] - sizes[20] < 10
    dogs[0].doing.place = "sum of x"
    dogs[0]._beat()
    assert dogs[0]._look() == "" and dogs[0]._seen[1].beat.progress == 10**9 + 99
    for dog in dogs:
        dog.close()


def test_a_slow_rank_that_goes_on_is_waited_for(monkeypatch):
    told, _ = verdict(monkeypatch, lambda number: Doing("collect", number // 4, "", 6))
    assert told == ""


def test_ranks_that_all_wait_in_the_same_place_are_told_that_their_connection_is_broken(monkeypatch):
    told, _ = verdict(monkeypatch, lambda number: Doing("update", 9, "sum of x", 7))
    assert told.endswith("as all other ranks do: their connection is broken")


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
def test_a_straggler_is_told_once_until_it_is_well_again(slow, lines):
    assert IN_A_ROW == 3
    stragglers = Stragglers()
    told = []
    for mark in slow:
        told += stragglers.observe({"collect": [0.1, 1.0 if mark == "s" else 0.15, 0.12], "update": [1.0, 1.1, 0.9]})
    assert len(told) == lines
    assert all("rank 1 is slow in collect: 1 s" in line and "0.11 s (median)" in line for line in told)


@pytest.mark.parametrize("seconds", [[1.0], [0.001, 0.015], [0.5, 1.0, 0.6]])
def test_one_rank_tiny_times_and_small_differences_are_no_stragglers(seconds):
    stragglers = Stragglers()
    assert not [line for _ in range(9) for line in stragglers.observe({"collect": seconds})]
