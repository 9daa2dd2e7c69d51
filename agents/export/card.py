"""The card of an exported policy: facts, scores, and code that plays its task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import gymnasium

from agents.run.config import SUMMARY
from agents.run.saved import LoadedAgent
from rl_dist.errors import printable
from rl_dist.files import read_object

LARGEST = 1e18  # of scores: larger numbers are rubbish
ONE_HOT = """

def one_hot(values, firsts, sizes):
    digits = np.ravel(values) - firsts
    return np.concatenate([np.arange(size) == digit for size, digit in zip(sizes, digits)])


"""


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
of actions are inside. This plays 1,000 steps:

```python
{playing_code(contract)}
```

## Configuration
```json
{json.dumps(sections, indent=2)}
```
"""


def playing_code(contract: dict[str, Any]) -> str:
    """Return a program that plays 1,000 steps of the policy's environment."""
    inputs, output, env = contract["inputs"], contract["outputs"][0], contract["env"]
    parts = inputs[0]["parts"]
    places = list(_places(contract["spaces"]["observation"]))
    if contract["spaces"]["observation"] is None:  # rows come whole
        columns = ["np.ravel(obs)"]
    else:
        columns = [_column(part, place) for part, place in zip(parts, places, strict=False)]
        columns += [_extra(part, output) for part in parts[len(places) :]]
    row = "".join(f"        {column},\n" for column in columns)
    head = "import gymnasium\nimport numpy as np\nimport onnxruntime\n"
    spec = gymnasium.registry.get(env["id"])
    if spec and str(spec.entry_point).startswith("envs."):
        head += "import envs  # of the trainer: registers the environment\n"
    head += ONE_HOT if "one_hot(" in row else "\n"
    made = f"{env['id']!r}, **{env['kwargs']}" if env["kwargs"] else f"{env['id']!r}"
    action = _action(contract["spaces"]["action"], iter(output["parts"]))
    return f"""{head}session = onnxruntime.InferenceSession("policy.onnx")
env = gymnasium.make({made})
obs, info = env.reset()
state, begins = np.zeros((1, {inputs[1]["shape"][-1]}), np.float32), True
for _ in range(1000):
    row = np.concatenate([
{row}    ], dtype=np.float32)
    inputs = {{"obs": row[None], "state": state, "episode_start": np.array([begins])}}
    (action,), state = session.run(["action", "next_state"], inputs)
    obs, reward, terminated, truncated, info = env.step({action})
    begins = terminated or truncated
    if begins:
        obs, info = env.reset()"""


def _places(space: dict[str, Any] | None, place: str = "obs") -> Iterator[str]:
    """Yield the Python expressions of the parts of an observation."""
    parts = (space or {}).get("parts")
    if parts is None:
        yield place
    for key, inner in parts.items() if isinstance(parts, dict) else enumerate(parts or ()):
        yield from _places(inner, f"{place}[{key!r}]")


def _column(part: dict[str, Any], place: str) -> str:
    """Return the Python expression of the numbers that a part of an observation is in a row."""
    if "one_hot" in part:
        firsts, sizes = (_list(part["one_hot"][name]) for name in ("first", "sizes"))
        return f"one_hot({place}, {firsts}, {sizes})"
    if "image" in part:
        image = part["image"]
        return f"np.ravel(np.transpose({place}, {image['axes']})) / {image['divided_by']}"
    return f"np.ravel({place})"


def _extra(part: dict[str, Any], output: dict[str, Any]) -> str:
    """Return the Python expression of what a row holds besides the observation."""
    if part["name"] == "action_mask":
        return "*map(np.ravel, info['action_mask'])"
    if part["name"] == "previous_reward":
        return "[0.0 if begins else reward]"
    before = f"(np.ravel(action) - {_list(output['offset'])}) / {_list(output['stretch'])}"
    if output["choices"]:
        before = f"one_hot(action, {_list(output['start'])}, {_list(output['choices'])})"
    return f"np.zeros({part['shape'][0]}) if begins else {before}"


def _action(
    space: dict[str, Any] | None, parts: Iterator[dict[str, Any]], whole: bool = True
) -> str:
    """Return the Python expression of an action in the environment's structure."""
    inner = (space or {}).get("parts")
    if isinstance(inner, dict):
        named = (f"{key!r}: {_action(each, parts, False)}" for key, each in inner.items())
        return f"{{{', '.join(named)}}}"
    if inner is not None:
        return f"({''.join(_action(each, parts, False) + ', ' for each in inner)})"
    part = next(parts)
    if whole:
        return "action"
    if not part["shape"]:
        return f"action[{part['columns'][0]}]"
    return f"action[{part['columns'][0]}:{part['columns'][1]}].reshape({part['shape']})"


def _list(values: list[Any]) -> str:
    """Return a list in Python; one of many equal values is short."""
    return (
        f"[{values[0]}] * {len(values)}"
        if len(values) > 3 and len(set(values)) == 1
        else f"{values}"
    )


def _scores(agent: LoadedAgent) -> str:
    """Return the scores of these weights, and of the newest where they are others."""
    found: list[str] = []
    if agent.measured:
        why = "by which the best checkpoint is chosen, which flatters it"
        found = [f"Of these weights, in training, {why}:\n", *_score_lines(agent.measured), ""]
    path = agent.run_dir / SUMMARY
    if not path.exists():
        no_end = "the run has no summary.json, as its training has not come to an end."
        return "\n".join([*found, f"None yet of the evaluation at the end: {no_end}"])
    summary = read_object(path, iteration=int)
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
