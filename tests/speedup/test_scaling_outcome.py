"""Predicted against measured at the end of a run on several ranks."""

import json

import numpy as np
import pytest

from rl_dist.speedup.model import expected_maximum
from rl_dist.speedup.outcome import describe, outcome, outcome_of

STEPS = 8
ENV_STEPS = 4096
REDUCTION_S = 0.002
SMALL_S = 0.01
COLLECT, STEP = (0.8, 0.05), (0.1, 0.01)  # mean and standard deviation


def simulated(ranks, iterations=100, seed=1):
    """Metrics of ranks that meet after the rollout and in every gradient step."""
    rng = np.random.default_rng(seed)
    for number in range(1, iterations + 1):
        collect = rng.normal(*COLLECT, ranks)
        own = rng.normal(*STEP, (STEPS, ranks))
        waits = own.max(1, keepdims=True) - own + REDUCTION_S
        sync = collect.max() - collect + SMALL_S
        elapsed = collect + own.sum(0) + waits.sum(0) + sync
        entries = [
            {
                "time/collect_s": collect[rank],
                "time/update_own_s": own[:, rank].sum(),
                "time/forward_s": 0.4 * own[:, rank].sum(),
                "time/backward_s": 0.5 * own[:, rank].sum(),
                "time/optimizer_s": 0.1 * own[:, rank].sum(),
                "time/reduction_s": waits[:, rank].min(),
                "time/step_spread_s": own[:, rank].std(ddof=1),
            }
            for rank in range(ranks)
        ]
        yield {
            "iteration": number,
            "global_step": ENV_STEPS * number,
            "optim/steps": float(STEPS),
            "time/sps": ENV_STEPS / elapsed[0],
            "time/sync_s": sync[0],
            "ranks": entries,
        }


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_meet_as_the_model_says_are_predicted(ranks):
    found = outcome(list(simulated(ranks)))
    assert abs(found["error"]) < 0.03
    waiting = expected_maximum(ranks) * (COLLECT[1] + STEPS * STEP[1])
    busy = COLLECT[0] + STEPS * STEP[0]
    assert found["busy"] == pytest.approx(
        busy / (busy + waiting + STEPS * REDUCTION_S + SMALL_S), rel=0.03
    )
    assert found["ranks"] == ranks and f"{ranks} ranks trained" in describe(found)


def write(folder, records):
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_only_iterations_on_the_last_of_several_numbers_of_ranks_are_compared(tmp_path):
    assert outcome_of(write(tmp_path, simulated(1, 5))) is None
    assert outcome_of(write(tmp_path, simulated(2, 2))) is None
    assert outcome_of(write(tmp_path, [])) is None
    later = ({**record, "iteration": record["iteration"] + 10} for record in simulated(2, 6))
    assert outcome_of(write(tmp_path, [*simulated(4, 10), *later]))["iterations"] == 4


@pytest.mark.parametrize(
    "damage",
    ["a line", '{"iteration": 1}', '{"ranks": [{}, {}], "iteration": 3, "global_step": 3}'],
)
def test_what_cannot_be_read_fails_no_run(damage, tmp_path):
    write(tmp_path, [])
    (tmp_path / "metrics.jsonl").write_text((damage + "\n") * 5)
    assert outcome_of(tmp_path) is None
