"""Test that exported policies act like trained ones, for all kinds and spaces."""

import json
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policies import FORMS, small
from train_runs import RECALL, printed_error, run_here, train_here

from agents import export
from agents.api import LoadedPolicy
from agents.config import RunConfig
from agents.learner.network.inputs import Normalizers
from agents.learner.policy import Policy
from agents.run.saved import LoadedAgent
from envs.task import Counts
from envs.vector.layout import Layout, Part
from envs.vector.space_json import to_json
from envs.vector.spaces import ActionDecoder, ObservationEncoder
from rl_dist.run_dir import RunDir

VECTOR = spaces.Box(-np.inf, np.inf, (4,), np.float32)
IMAGES = spaces.Dict(  # a list keeps its order; Gymnasium sorts the keys of a dict
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
    "nested actions": (small(), VECTOR, NESTED),
    "images": (small(policy="gru"), IMAGES, spaces.Discrete(4)),
    "many digits": (small(), spaces.Box(-1, 1, (4,), np.float64), BOUNDED),
    "windows of images": (small(feature_window=3), IMAGES, BOUNDED),
    "pixels": (small(policy="lstm"), spaces.Box(0, 255, (1, 40, 36), np.uint8), BOUNDED),
    "windows of pixels": (small(feature_window=2), spaces.Box(0, 15, (9, 9), np.uint8), BOUNDED),
}
# Tracing takes seconds: by default only these policies are traced, the others with `-m slow`.
QUICK = ("clstm", "own encoder, two own cores")
TRACED = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ALL]


def make_agent(config, observation, action, folder, extras=()):
    """Return an agent with random weights and statistics, as if loaded from a run."""
    torch.manual_seed(4)
    decoder = ActionDecoder(action, "here")
    parts = ObservationEncoder(observation, "here", decoder).parts
    policy = Policy(config, Layout((*parts, *extras)), decoder.space)
    # With large weights, actions for different observations clearly differ.
    torch.nn.init.normal_(policy.actor_head.weight, std=1.0)
    normalizer = Normalizers(policy.layout, scale_obs=True, scale_rewards=False).obs
    columns = policy.layout.columns("vector")
    normalizer.moments.mean[columns] = 3.0 * torch.randn(len(columns), dtype=torch.float64)
    normalizer.moments.variance[columns] = 0.1 + torch.rand(len(columns), dtype=torch.float64)
    path = folder / "best.pt"
    path.write_bytes(b"stands for a checkpoint")
    saved = to_json(observation, action)
    counts = Counts(global_step=0, episodes=0)
    directory = RunDir(folder)
    rows = torch.randn(16, policy.num_obs)
    return LoadedAgent(
        policy, normalizer, RunConfig(policy=config), 3, path, directory, saved, counts, rows
    )


def agent_of(form, folder, extras=()):
    return make_agent(*ALL[form], folder, extras)


def difference(agent, change=lambda *inputs: inputs):
    """Return the largest difference between actions of `agent` and its ExportedStep.

    `change` alters the inputs of the ExportedStep. The ExportedStep runs in torch; it is not traced
    to ONNX, because tracing takes seconds.
    """
    step = export.ExportedStep(agent)

    @torch.no_grad()
    def run(*inputs):
        return tuple(part.numpy() for part in step(*map(torch.from_numpy, change(*inputs))))

    return export.largest_difference(agent, step, run)


@pytest.mark.parametrize("form", ALL)
def test_the_exported_step_equals_every_kind_of_policy(form, tmp_path):
    assert difference(agent_of(form, tmp_path)) <= export.TOLERANCE


def test_large_observations_are_centred_before_they_become_float32(tmp_path):
    agent = make_agent(*ALL["many digits"], tmp_path)
    agent.normalizer.moments.mean += 1.7e9
    policy = LoadedPolicy(agent)
    assert (policy.predict([1.7e9] * 4)[0] != policy.predict([1.7e9 + 2] * 4)[0]).all()
    assert difference(agent) <= export.TOLERANCE
    step = export.ExportedStep(agent)
    assert export.make_contract(agent, step)["inputs"][0]["type"] == "float64"


@pytest.mark.parametrize("form", TRACED)
def test_onnx_runtime_equals_every_kind_of_policy(form, tmp_path):
    onnx = pytest.importorskip("onnx", reason="the extra export is not installed")
    path, contract = export.export(agent_of(form, tmp_path), tmp_path / "out")
    assert contract["check"]["max_difference"] <= export.TOLERANCE
    model = onnx.load(path)
    (stored,) = (entry.value for entry in model.metadata_props if entry.key == "contract")
    assert json.loads(stored)["inputs"] == contract["inputs"]


FAULTS = {
    "never resets": lambda obs, state, start: (obs, state, start & False),
    "forgets": lambda obs, state, start: (obs, 0 * state, start),
    "sees noise": lambda obs, state, start: (obs + np.float32(1e-3), state, start),
    "nan": lambda obs, state, start: (obs * np.nan, state, start),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_detects_a_faulty_step(fault, tmp_path):
    assert difference(agent_of("clstm", tmp_path), FAULTS[fault]) > export.TOLERANCE


def test_the_contract_describes_how_values_become_rows(tmp_path):
    """Build a row from the contract alone; it must equal the row that training sees."""
    agent = agent_of("images", tmp_path, [Part("previous_reward", "vector", (1,))])
    contract = export.make_contract(agent, export.ExportedStep(agent))
    values = IMAGES.sample()
    obs, action = contract["inputs"][0], contract["outputs"][0]
    row = np.zeros((1, obs["shape"][1]), np.float32)
    for part in obs["parts"][:-1]:
        value = values[part["name"]]
        if image := part.get("image"):
            value = np.transpose(value, image["axes"]) * image["multiplied_by"]
        elif choices := part.get("one_hot"):
            value = np.eye(choices["sizes"][0])[value - choices["first"][0]]
        row[0, slice(*part["columns"])] = np.ravel(value)
    np.testing.assert_array_equal(row[:, :-1], agent.encoder()([values], 1))
    assert obs["parts"][-1]["name"] == "previous_reward"
    assert (action["choices"], action["start"], action["type"]) == ([4], [0], "int64")


def test_a_run_is_exported_by_the_command(tmp_path, monkeypatch, untraced, capsys):
    """Test the command on a good and a faulty model, and without ONNX Runtime.

    The command deletes a model whose actions differ from those of its policy. Without ONNX Runtime,
    the command prints a one-line error.
    """
    flags = ["--env=Pendulum-v1", "--total_steps=128", "--eval_episodes=2"]
    run_dir, folder = tmp_path / "run", tmp_path / "run" / "export" / "onnx"
    assert train_here(*RECALL, *flags, "--run_dir", run_dir) == 0
    assert run_here(export.main, run_dir) == 0
    contract = json.loads((folder / "contract.json").read_text())
    assert contract["env"] == {"id": "Pendulum-v1", "kwargs": {}}
    assert contract["outputs"][0]["stretch"] == [2.0] and (folder / contract["file"]).exists()
    monkeypatch.setattr(export, "largest_difference", lambda *_: 2 * export.TOLERANCE)
    assert run_here(export.main, run_dir) == 1
    assert not (folder / contract["file"]).exists()
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as if ONNX Runtime were not installed
    assert run_here(export.main, run_dir) == 2
    assert "clstm-ppo[export]" in printed_error(capsys)
