"""Exported policies equal the trained ones, in every format, for all forms of policies."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from policies import FORMS
from train_runs import RECALL, run_here, train_here

from agents import load_policy
from agents.api.policy import LoadedPolicy
from agents.export import command, numpy_policy
from agents.export.check import TOLERANCE, largest_difference
from agents.export.command import export
from agents.export.formats import run_safetensors
from agents.export.numpy_policy import NumpyPolicy
from agents.export.step import ExportedStep
from agents.network.normalize import observation_normalizer
from agents.policy import Policy, PolicyConfig
from agents.run.config import RunConfig
from agents.run.saved import LoadedAgent
from envs.vector.layout import Layout, Part
from envs.vector.spaces import ActionDecoder, ObservationEncoder, to_json
from examples import deployment
from rl_dist.errors import UserError

VECTOR = spaces.Box(-np.inf, np.inf, (4,), np.float32)
IMAGES = spaces.Dict(
    camera=spaces.Box(0, 255, (2, 13, 12, 3), np.uint8), speed=VECTOR, gear=spaces.Discrete(3)
)
BOUNDED = spaces.Box(np.array([[0.1, -7]], np.float32), np.array([[0.3, 900]], np.float32))
MASKED = spaces.Dict(action_mask=spaces.MultiBinary(7), place=VECTOR)
NESTED = spaces.Dict(
    left=spaces.Box(-2.0, 3.0, (2,)), right=spaces.Tuple([spaces.Box(0.0, np.inf, (1, 1))])
)
SIZED = PolicyConfig(hidden_size=8)
# form: (configuration, observations, actions)
SPACES = {
    "start of choices": (SIZED, VECTOR, spaces.Discrete(3, start=5)),
    "several masked choices": (SIZED, MASKED, spaces.MultiDiscrete([4, 3])),
    "switches": (replace(SIZED, policy="lstm"), VECTOR, spaces.MultiBinary([2, 2])),
    "squashed": (replace(SIZED, squash_actions=True), VECTOR, BOUNDED),
    "nested actions": (SIZED, VECTOR, NESTED),
    "images": (replace(SIZED, policy="gru"), IMAGES, spaces.Discrete(4)),
    "windows of images": (replace(SIZED, feature_window=3), IMAGES, BOUNDED),
}
ALL = {name: (config, VECTOR, BOUNDED) for name, config in FORMS.items()} | SPACES
HAS_ONNX = all(map(find_spec, ("onnx", "onnxscript", "onnxruntime")))
NEEDS_ONNX = pytest.mark.skipif(not HAS_ONNX, reason="the extra `export` is not installed")


def few_of(quick, forms=ALL):
    """Forms, of which only the quick ones are tested by default: tracing takes seconds."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in forms]


def agent_of(form, folder, extras=()):
    """An agent as if it had been loaded, whose weights and statistics are random."""
    torch.manual_seed(4)
    config, observation, action = ALL[form]
    decoder = ActionDecoder(action, "here")
    parts = ObservationEncoder(observation, "here", decoder.sizes.tolist()).parts
    policy = Policy(config, Layout((*parts, *extras)), decoder.space)
    torch.nn.init.normal_(policy.actor_head.weight, std=1.0)  # actions that differ visibly
    normalizer = observation_normalizer(policy.layout, True)
    columns = policy.layout.columns("vector")
    normalizer.moments.mean[columns] = 3.0 * torch.randn(len(columns), dtype=torch.float64)
    normalizer.moments.variance[columns] = 0.1 + torch.rand(len(columns), dtype=torch.float64)
    path = folder / "best.pt"
    path.write_bytes(b"stands for a checkpoint")
    saved = to_json(observation, action)
    return LoadedAgent(policy, normalizer, RunConfig(policy=config), 3, path, folder, saved)


@pytest.mark.parametrize("form", [name for name in ALL if name != "own"])
def test_numpy_computes_every_form(form, tmp_path):
    path, contract = export(agent_of(form, tmp_path), "safetensors", tmp_path / "out")
    assert 0.0 < contract["check"]["max_difference"] <= TOLERANCE
    assert numpy_policy.NumpyPolicy(path).contract["network"] == contract["network"]


@pytest.mark.parametrize("form", few_of({"clstm"}))
def test_torch_runs_what_was_exported(form, tmp_path):
    path, contract = export(agent_of(form, tmp_path), "pt2", tmp_path / "out")
    assert contract["check"]["max_difference"] <= TOLERANCE
    assert not any("lstm" in str(node.target) for node in torch.export.load(path).graph.nodes)


@NEEDS_ONNX
@pytest.mark.parametrize("form", few_of({"clstm", "own"}))
def test_onnx_runtime_computes_every_form(form, tmp_path):
    import onnx

    path, contract = export(agent_of(form, tmp_path), "onnx", tmp_path / "out")
    assert contract["check"]["max_difference"] <= TOLERANCE
    model = onnx.load(path)
    assert not {"LSTM", "GRU", "Loop", "Scan"} & {node.op_type for node in model.graph.node}
    sizes = [each.type.tensor_type.shape.dim[0].dim_param for each in model.graph.input]
    assert sizes == ["batch"] * 3
    (stored,) = (entry.value for entry in model.metadata_props if entry.key == "contract")
    assert json.loads(stored)["inputs"] == contract["inputs"]


def test_what_differs_is_refused_and_removed(tmp_path, monkeypatch):
    agent = agent_of("clstm", tmp_path)
    run = export(agent, "safetensors", tmp_path)[0]
    step, runner = ExportedStep(agent), run_safetensors(run)
    never = np.zeros(7, bool)
    faults = {
        "never resets": lambda obs, state, start: runner(obs, state, never[: len(start)]),
        "forgets": lambda obs, state, start: runner(obs, 0 * state, start),
        "mixes rows": lambda obs, state, start: runner(obs, state[::-1], start),
        "is off": lambda obs, state, start: runner(obs + 1e-3, state, start),
        "is lost": lambda obs, state, start: (runner(obs, state, start)[0] * np.nan, state),
    }
    for fault, wrong in faults.items():
        assert largest_difference(agent, step, wrong) > TOLERANCE, fault
    monkeypatch.setattr(numpy_policy, "sigmoid", lambda x: 0.5 * (1 + np.tanh(0.501 * x)))
    with pytest.raises(UserError, match=r"differs from the trained one by .*removed") as refused:
        export(agent, "safetensors", tmp_path)
    assert refused.value.exit_code == 1 and not run.exists()


def test_what_a_file_cannot_hold_is_refused_before_it_is_written(tmp_path):
    with pytest.raises(UserError, match="cannot hold --core own_cores:Decay.*onnx or pt2"):
        export(agent_of("own", tmp_path), "safetensors", tmp_path / "out")
    turned = spaces.Dict({**IMAGES.spaces, "camera": spaces.Box(0, 255, (2, 3, 12, 13), np.uint8)})
    agent = replace(agent_of("images", tmp_path), spaces_json=to_json(turned, spaces.Discrete(4)))
    with pytest.raises(UserError, match="trained on observations of .*the version it was trained"):
        export(agent, "pt2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_contract_names_every_column_and_its_encoding(tmp_path):
    extras = (Part("previous_action", "plain", (4,)), Part("previous_reward", "vector", (1,)))
    _, contract = export(agent_of("images", tmp_path, extras), "safetensors", tmp_path)
    parts = contract["inputs"][0]["parts"]
    names = ["camera", "speed", "gear", "previous_action", "previous_reward"]
    assert [part["name"] for part in parts] == names
    ends = [0, *(part["columns"][1] for part in parts)]
    assert [part["columns"][0] for part in parts] == ends[:-1]
    assert ends[-1] == contract["inputs"][0]["shape"][1] == 936 + 3 + 4 + 4 + 1
    assert parts[0]["image"] == {"axes": [0, 3, 1, 2], "divided_by": 255}
    assert parts[2]["one_hot"] == {"first": [0], "sizes": [3]}
    assert "zeros at an episode start" in parts[3]["meaning"]
    nested = export(agent_of("nested actions", tmp_path), "safetensors", tmp_path)[1]
    assert nested["outputs"][0]["parts"] == [
        {"name": "left", "columns": [0, 2], "shape": [2]},
        {"name": "right/0", "columns": [2, 3], "shape": [1, 1]},
    ]


def test_bounds_hold_to_the_last_bit(tmp_path):
    """Also those of a float64 space, which float32 cannot hold."""
    space = spaces.Box(np.array([0.1]), np.array([0.3]), dtype=np.float64)
    agent = agent_of("clstm", tmp_path)
    step = ExportedStep(replace(agent, spaces_json=to_json(VECTOR, space)))
    for bound in (step.low, step.high):
        assert space.contains(bound.double().numpy())
    assert not space.contains(np.array([0.3], np.float32).astype(np.float64))  # rounded up


def test_the_command_exports_a_run_that_numpy_runs_elsewhere(tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    flags = ["--env", "Pendulum-v1", "--total_steps", "128", "--eval_episodes", "2", "--seed", "3"]
    assert train_here(monkeypatch, *RECALL, *flags, "--run_dir", run_dir) == 0
    arguments = [run_dir, "--format", "safetensors"]
    assert run_here(command.main, arguments, monkeypatch) == 0
    assert "differs from torch by at most" in capsys.readouterr().out
    assert len(Path(numpy_policy.__file__).read_text().splitlines()) < 100
    folder = run_dir / "export" / "safetensors"
    card = (folder / "README.md").read_text()
    assert "Policy for Pendulum-v1" in card and ", 128 environment steps, seed 3 |" in card
    assert "of these weights:\n\n- return: " in card and '"total_steps": 128' in card

    # the card's snippet runs beside the file; tests/test_docs_run.py runs those of the pages
    text = card.split("```python\n")[1].split("```")[0] + "print(np.abs(action).max() <= 2)"
    code = [sys.executable, "-c", text]
    done = subprocess.run(code, capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.stdout == "True\n", done.stderr
    summary = run_dir / "summary.json"
    summary.write_text(summary.read_text().replace('"iteration": ', '"iteration": 9'))
    for problem in ("the newest weights, of iteration 9", "None yet of the evaluation at the end"):
        assert run_here(command.main, arguments, monkeypatch) == 0
        assert problem in (folder / "README.md").read_text()
        summary.unlink(missing_ok=True)  # as of a run that has not finished
    # the copied runner alone acts as the policy does, in the environment
    monkeypatch.syspath_prepend(shutil.copytree(folder, tmp_path / "elsewhere"))
    copied = __import__("numpy_policy").NumpyPolicy(tmp_path / "elsewhere/policy.safetensors")
    policy, env = load_policy(run_dir), gymnasium.make("Pendulum-v1")
    sys.modules.pop("numpy_policy")
    obs, _ = env.reset(seed=1)
    state, own = None, copied.initial_state(1)
    for number in range(50):
        expected, state = policy.predict(obs, state)
        action, own = copied(obs[None], own, np.array([number == 0]))
        np.testing.assert_allclose(action[0], expected, rtol=0, atol=1e-5)
        obs = env.step(action[0])[0]


PREVIOUS = Part("previous_reward", "vector", (1,))
PLAYED = {  # form: what its rows hold besides the observation
    "images": (Part("action_mask", "mask", (4,)), Part("previous_action", "plain", (4,)), PREVIOUS),
    "several masked choices": (Part("previous_action", "plain", (7,)),),
    "start of choices": (PREVIOUS,),
    "nested actions": (Part("previous_action", "plain", (3,)),),
    "windows of images": (Part("previous_action", "plain", (2,)), PREVIOUS),
    "switches": (Part("action_mask", "mask", (8,)),),
}


IN_ONNX = [
    pytest.param(*each.values, "onnx", marks=[*each.marks, NEEDS_ONNX])
    for each in few_of({"several masked choices"}, PLAYED)
]


@pytest.mark.parametrize(("form", "kind"), [*((form, "safetensors") for form in PLAYED), *IN_ONNX])
def test_the_example_plays_any_space_as_the_policy_does(form, kind, tmp_path):
    agent = agent_of(form, tmp_path, PLAYED[form])
    path, contract = export(agent, kind, tmp_path)
    policy = LoadedPolicy(agent)
    step = NumpyPolicy(path) if kind == "safetensors" else deployment.load(tmp_path)[1]
    played = deployment.DeployedPolicy(json.loads(json.dumps(contract)), step)
    asked = {part.name for part in PLAYED[form]}
    policy.observation_space.seed(1)
    rng, state, reward = np.random.default_rng(2), None, 0.0
    for number in range(30):
        begins = number % 11 == 0
        obs = policy.observation_space.sample()
        masks = rng.integers(0, 2, policy._decode.mask_size)
        masks[np.cumsum(policy._decode.sizes) - 1] = 1  # the last of every choice
        if "action_mask" in getattr(policy.observation_space, "spaces", ()):
            obs["action_mask"] = masks.astype(np.int8)
        more = {"reward": reward} if "previous_reward" in asked else {}
        more |= {"action_masks": masks} if "action_mask" in asked else {}
        expected, state = policy.predict(obs, state, np.array([begins]), **more)
        if begins:
            played.begin()
        found = played.act(obs, {"action_mask": masks}, reward)
        for one, other in zip(leaves_of(found), leaves_of(expected), strict=True):
            assert np.shape(one) == np.shape(other)
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        reward = float(rng.normal())


def leaves_of(action):
    if isinstance(action, dict | tuple):
        inner = action.values() if isinstance(action, dict) else action
        return [leaf for part in inner for leaf in leaves_of(part)]
    return [action]


def test_the_command_refuses_in_one_line(tmp_path, monkeypatch, capsys):
    arguments = [tmp_path / "nothing", "--format", "pt2"]
    assert run_here(command.main, arguments, monkeypatch) == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as if it were not installed
    monkeypatch.setattr(command, "load_agent", lambda *_, **__: agent_of("clstm", tmp_path))
    arguments = [tmp_path, "--format", "onnx", "--output", tmp_path / "out"]
    assert run_here(command.main, arguments, monkeypatch) == 2
    assert "clstm-ppo[export]" in capsys.readouterr().err
