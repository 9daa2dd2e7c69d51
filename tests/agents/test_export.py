"""Test that exported policies equal the trained ones, for all kinds and spaces."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policies import FORMS, small
from train_runs import RECALL, only_error, run_here, train_here

from agents.config import RunConfig
from agents.export import command
from agents.export.command import TOLERANCE, export, largest_difference, make_contract
from agents.export.step import ExportedStep
from agents.network.inputs import observation_normalizer
from agents.policy import Policy
from agents.run.saved import LoadedAgent
from envs.vector.layout import Layout, Part
from envs.vector.spaces import ActionDecoder, ObservationEncoder, to_json
from rl_dist.errors import UserError

VECTOR = spaces.Box(-np.inf, np.inf, (4,), np.float32)
IMAGES = spaces.Dict(  # a list keeps its order: the keys are not sorted
    [
        ("camera", spaces.Box(0, 255, (2, 13, 12, 3), np.uint8)),
        ("speed", VECTOR),
        ("gear", spaces.Discrete(3)),
    ]
)
BOUNDED = spaces.Box(np.array([[0.1, -7]], np.float32), np.array([[0.3, 900]], np.float32))
MASKED = spaces.Dict(action_mask=spaces.MultiBinary(7), place=VECTOR)
NESTED = spaces.Dict(
    left=spaces.Box(-2.0, 3.0, (2,)), right=spaces.Tuple([spaces.Box(0.0, np.inf, (1, 1))])
)
# name: (policy configuration, observation space, action space)
ALL = {name: (config, VECTOR, BOUNDED) for name, config in FORMS.items()} | {
    "start of choices": (small(), VECTOR, spaces.Discrete(3, start=5)),
    "several masked choices": (small(), MASKED, spaces.MultiDiscrete([4, 3])),
    "switches": (small(policy="lstm"), VECTOR, spaces.MultiBinary([2, 2])),
    "squashed": (small(squash_actions=True), VECTOR, BOUNDED),
    "nested actions": (small(), VECTOR, NESTED),
    "images": (small(policy="gru"), IMAGES, spaces.Discrete(4)),
    "windows of images": (small(feature_window=3), IMAGES, BOUNDED),
}
QUICK = ("clstm", "own")  # tracing takes seconds: other forms are slow tests
TRACED = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ALL]


def make_agent(config, observation, action, folder, extras=()):
    """Return an agent with random weights and statistics, as if loaded from a run."""
    torch.manual_seed(4)
    decoder = ActionDecoder(action, "here")
    parts = ObservationEncoder(observation, "here", decoder.sizes).parts
    policy = Policy(config, Layout((*parts, *extras)), decoder.space)
    torch.nn.init.normal_(policy.actor_head.weight, std=1.0)  # so that actions clearly differ
    normalizer = observation_normalizer(policy.layout, True)
    columns = policy.layout.columns("vector")
    normalizer.moments.mean[columns] = 3.0 * torch.randn(len(columns), dtype=torch.float64)
    normalizer.moments.variance[columns] = 0.1 + torch.rand(len(columns), dtype=torch.float64)
    path = folder / "best.pt"
    path.write_bytes(b"stands for a checkpoint")
    saved = to_json(observation, action)
    return LoadedAgent(policy, normalizer, RunConfig(policy=config), 3, path, folder, saved)


def agent_of(form, folder, extras=()):
    return make_agent(*ALL[form], folder, extras)


def difference(agent, change=lambda *inputs: inputs, step=None):
    """Return the largest difference between an agent and its export, run in torch.

    `change` alters the inputs of the exported step. Tracing to ONNX is skipped: it takes seconds.
    """
    step = step or ExportedStep(agent)

    @torch.no_grad()
    def run(*inputs):
        return tuple(part.numpy() for part in step(*map(torch.from_numpy, change(*inputs))))

    return largest_difference(agent, step, run)


@pytest.mark.parametrize("form", ALL)
def test_the_step_computes_every_form(form, tmp_path):
    assert difference(agent_of(form, tmp_path)) <= TOLERANCE


@pytest.mark.parametrize("form", TRACED)
def test_onnx_runtime_computes_every_form(form, tmp_path):
    onnx = pytest.importorskip("onnx", reason="the extra export is not installed")
    path, contract = export(agent_of(form, tmp_path), tmp_path / "out")
    assert contract["check"]["max_difference"] <= TOLERANCE
    model = onnx.load(path)
    assert not {"LSTM", "GRU", "Loop", "Scan"} & {node.op_type for node in model.graph.node}
    (stored,) = (entry.value for entry in model.metadata_props if entry.key == "contract")
    assert json.loads(stored)["inputs"] == contract["inputs"]


FAULTS = {
    "never resets": lambda obs, state, start: (obs, state, start & False),
    "mixes rows": lambda obs, state, start: (obs, state[::-1].copy(), start),
    "forgets": lambda obs, state, start: (obs, 0 * state, start),
    "sees noise": lambda obs, state, start: (obs + np.float32(1e-3), state, start),
    "nan": lambda obs, state, start: (obs * np.nan, state, start),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_step_differs(fault, tmp_path):
    assert difference(agent_of("clstm", tmp_path), FAULTS[fault]) > TOLERANCE


def test_a_model_that_differs_is_refused_and_removed(tmp_path, untraced, monkeypatch):
    monkeypatch.setattr(command, "largest_difference", lambda *_: 2 * TOLERANCE)
    with pytest.raises(UserError, match="differs") as refused:
        export(agent_of("clstm", tmp_path), tmp_path / "out")
    assert refused.value.exit_code == 1 and not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("form", ["nested actions", "several masked choices"])
def test_large_values_may_differ_by_their_rounding(form, tmp_path):
    agent = agent_of(form, tmp_path)
    weight = agent.policy.actor_head.weight.data  # [A, H]
    noise = 1 + 1e-6 * torch.randn_like(weight)
    torch.nn.init.normal_(weight, std=1e6)
    weight[1::2] = (weight[:-1:2] * noise[:-1:2])[: len(weight[1::2])]  # nearly equal logits
    other = ExportedStep(agent)
    other.policy.actor_head.weight.mul_(noise)
    assert 1e-8 < difference(agent, step=other) <= TOLERANCE
    other.policy.actor_head.weight.neg_()
    assert difference(agent, step=other) > TOLERANCE


def test_bounds_hold_to_the_last_bit(tmp_path):
    """Float32 actions stay inside bounds of a float64 space, which float32 rounds."""
    space = spaces.Box(np.array([0.1]), np.array([0.3]), dtype=np.float64)
    step = ExportedStep(replace(agent_of("clstm", tmp_path), spaces_json=to_json(VECTOR, space)))
    for bound in (step.low, step.high):
        assert space.contains(bound.double().numpy())
    assert not space.contains(np.array([0.3], np.float32).astype(np.float64))  # rounded up: outside


def test_the_contract_says_how_values_become_rows(tmp_path):
    """Rows built only from the contract equal the rows of the training encoder."""
    agent = agent_of("images", tmp_path, [Part("previous_reward", "vector", (1,))])
    contract = make_contract(agent, ExportedStep(agent))
    IMAGES.seed(1)
    values = IMAGES.sample()
    *parts, extra = contract["inputs"][0]["parts"]
    row = np.zeros((1, contract["inputs"][0]["shape"][1]), np.float32)
    for part in parts:
        value = values[part["name"]]
        if image := part.get("image"):
            value = np.transpose(value, image["axes"]) / np.float32(image["divided_by"])
        elif choices := part.get("one_hot"):
            value = np.eye(choices["sizes"][0])[value - choices["first"][0]]
        row[0, slice(*part["columns"])] = np.ravel(value)
    rows = agent.encoder()([values], 1)
    np.testing.assert_array_equal(row[:, :-1], rows)
    width = rows.shape[1]
    assert (extra["name"], extra["columns"]) == ("previous_reward", [width, width + 1])
    action = contract["outputs"][0]
    assert (action["choices"], action["start"], action["type"]) == ([4], [0], "int64")


def test_a_run_is_exported_by_the_command(tmp_path, monkeypatch, untraced):
    flags = ["--env", "Pendulum-v1", "--total_steps", "128", "--eval_episodes", "2"]
    assert train_here(monkeypatch, *RECALL, *flags, "--run_dir", tmp_path / "run") == 0
    assert run_here(command.main, [tmp_path / "run"], monkeypatch) == 0
    folder = tmp_path / "run" / "export" / "onnx"
    contract = json.loads((folder / "contract.json").read_text())
    assert contract["env"] == {"id": "Pendulum-v1", "kwargs": {}}
    assert contract["outputs"][0]["stretch"] == [2.0]
    assert contract["sha256"] == command.file_hash(folder / contract["file"])


def test_a_missing_runtime_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as if it were not installed
    monkeypatch.setattr(command, "load_agent", lambda *_, **__: agent_of("clstm", tmp_path))
    arguments = [tmp_path, "--output", tmp_path / "out"]
    assert run_here(command.main, arguments, monkeypatch) == 2
    assert "clstm-ppo[export]" in only_error(capsys.readouterr().err)
