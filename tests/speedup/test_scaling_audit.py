"""Predicted against measured at the end of a run on several ranks."""

import json

import numpy as np
import pytest

from rl_dist.speedup.audit import audit, compare, describe
from rl_dist.speedup.model import expected_maximum

STEPS = 8
ENV_STEPS = 4096
REDUCTION_S = 0.002
SMALL_S = 0.01
COLLECT, STEP = (0.8, 0.05), (0.1, 0.01)  # mean and standard deviation


def simulated(ranks, iterations=100, first=1):
    """Records of ranks that meet after the rollout and in every gradient step."""
    rng = np.random.default_rng(1)
    for iteration in range(first, first + iterations):
        collect = rng.normal(*COLLECT, ranks)
        own = rng.normal(*STEP, (STEPS, ranks))
        waits = own.max(1, keepdims=True) - own + REDUCTION_S
        sync = collect.max() - collect + SMALL_S
        elapsed = collect + own.sum(0) + waits.sum(0) + sync
        entries = [
            {
                "time/collect_s": collect[rank],
                "time/update_own_s": own[:, rank].sum(),
                "time/reduction_s": waits[:, rank].min(),
                "time/step_spread_s": own[:, rank].std(ddof=1),
            }
            for rank in range(ranks)
        ]
        yield {
            "iteration": iteration,
            "global_step": ENV_STEPS * iteration,
            "optim/steps": float(STEPS),
            "time/sps": ENV_STEPS / elapsed[0],
            "time/sync_s": sync[0],
            "ranks": entries,
        }


def write(folder, *lines):
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_meet_as_the_model_says_are_predicted(ranks):
    found = compare(list(simulated(ranks)))
    assert abs(found["error"]) < 0.03
    waiting = expected_maximum(ranks) * (COLLECT[1] + STEPS * STEP[1])
    busy = COLLECT[0] + STEPS * STEP[0]
    whole = busy + waiting + STEPS * REDUCTION_S + SMALL_S
    assert found["busy"] == pytest.approx(busy / whole, rel=0.03)
    assert str(ranks) in describe(found)


@pytest.mark.parametrize(
    ("records", "compared"),
    [
        (simulated(1, 5), None),
        (simulated(2, 2), None),
        ((), None),
        ([*simulated(4, 10), *simulated(2, 6, first=11)], 4),  # of the last number of ranks
    ],
)
def test_iterations_that_are_compared(records, compared, tmp_path):
    found = audit(write(tmp_path, *map(json.dumps, records)))
    assert (found and found["iterations"]) == compared


@pytest.mark.parametrize(
    "damage",
    ["a line", '{"iteration": 1}', '{"ranks": [{}, {}], "iteration": 3, "global_step": 3}'],
)
def test_what_cannot_be_read_fails_no_run(damage, tmp_path):
    assert audit(write(tmp_path, *[damage] * 5)) is None
