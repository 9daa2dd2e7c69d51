"""The card of an exported policy: facts, scores, and code that plays its task."""

from __future__ import annotations

import json
from typing import Any

from agents.run.saved import LoadedAgent
from rl_dist.errors import printable
from rl_dist.run_dir import RunDir

LARGEST = 1e18  # of scores: larger numbers are rubbish
USE = """from pathlib import Path
from play import DeployedPolicy, load, make_env

contract, step = load(Path("."))
policy, env = DeployedPolicy(contract, step), make_env(contract)
(obs, info), reward = env.reset(), 0.0
for _ in range(1000):
    obs, reward, terminated, truncated, info = env.step(policy.act(obs, info, reward))
    if terminated or truncated:
        obs, info = env.reset()
        policy.begin()"""


def make_card(agent: LoadedAgent, contract: dict[str, Any]) -> str:
    """Return the card: task, training, scores, how to run it, configuration."""
    config, check = agent.config, contract["check"]
    task = printable(f"{config.task.env} {config.task.env_kwargs}".rstrip())
    steps = f"{agent.global_step:,} environment steps"
    trained = f"{agent.iteration} iterations of recurrent PPO, {steps}"
    sections = {name: config.to_dict()[name] for name in ("task", "policy", "train", "ppo")}
    obs, state = (contract["inputs"][index]["shape"][-1] for index in (0, 1))
    checkpoint = printable(contract["checkpoint"]["file"])
    return f"""# Policy for {printable(config.task.env)}

| | |
|---|---|
| Task | `{task}` |
| Policy | {config.policy.policy}, hidden size {config.policy.hidden_size}, without noise |
| Trained | {trained}, seed {config.train.seed} |
| Checkpoint | `{checkpoint}`, SHA-256 `{contract["checkpoint"]["sha256"]}` |
| File | `{contract["file"]}`, SHA-256 `{contract["sha256"]}` |
| Checked | {check["runtime"]} differs from torch by at most {check["max_difference"]:.1e} |

## Scores
{_scores(agent)}

## Use
`obs` [batch, {obs}], `state` [batch, {state}] and `episode_start` [batch] go in, `action` and
`next_state` come out. `contract.json` says what the columns are. Normaliser, reset and the bounds
of actions are inside. `play.py` makes rows and actions of the environment's spaces. This plays
1,000 steps:

```python
{USE}
```

## Configuration
```json
{json.dumps(sections, indent=2)}
```
"""


def _scores(agent: LoadedAgent) -> str:
    """Return the scores of these weights, and of the newest where they are others."""
    found: list[str] = []
    if agent.measured:
        why = "by which the best checkpoint is chosen, which flatters it"
        found = [f"Of these weights, in training, {why}:\n", *_score_lines(agent.measured), ""]
    summary = RunDir(agent.run_dir).summary()
    if not summary:
        no_end = "the run has no summary.json, as its training has not come to an end."
        return "\n".join([*found, f"None yet of the evaluation at the end: {no_end}"])
    newest = summary["iteration"]
    whose = "these weights"
    if newest != agent.iteration:
        whose = (
            f"the newest weights, of iteration {newest}, NOT of these, of iteration "
            f"{agent.iteration}, which python -m agents.evaluate measures"
        )
    lines = _score_lines(summary.get("test", summary))  # the test span may still be closed
    return "\n".join([*found, f"At the end of the training, of {whose}:\n", *lines])


def _score_lines(tested: Any) -> list[str]:
    """Return one line per number of a nested summary."""
    lines, waiting = [], [("", tested)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{name} {key}".strip(), value[key]) for key in reversed(value)]
        elif isinstance(value, int | float) and not abs(value) > LARGEST:
            lines.append(f"- {printable(name)}: {value:.6g}")
    return lines
