"""Exported policies equal the trained ones, for all forms of policies and spaces."""

import json
import sys
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from policies import FORMS
from train_runs import RECALL, only_error, run_here, train_here

from agents.api.policy import LoadedPolicy
from agents.config import RunConfig
from agents.export import command
from agents.export.card import make_card
from agents.export.check import TOLERANCE, largest_difference
from agents.export.command import export
from agents.export.step import ExportedStep
from agents.network.inputs import observation_normalizer
from agents.policy import Policy, PolicyConfig
from agents.run.saved import LoadedAgent, load_agent
from envs.task import TaskConfig
from envs.vector.layout import Layout, Part
from envs.vector.spaces import ActionDecoder, ObservationEncoder, to_json
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


def in_torch(step):
    """Return a runner of the step itself: tracing takes seconds."""
    run = torch.no_grad()(lambda *inputs: step(*map(torch.from_numpy, inputs)))
    return lambda *inputs: tuple(each.numpy() for each in run(*inputs))


@pytest.mark.parametrize("form", ALL)
def test_the_step_computes_every_form(form, tmp_path):
    agent = agent_of(form, tmp_path)
    step = ExportedStep(agent)
    assert largest_difference(agent, step, in_torch(step)) <= TOLERANCE


@pytest.mark.parametrize("form", few_of({"clstm", "own"}))
def test_onnx_runtime_computes_every_form(form, tmp_path):
    onnx = pytest.importorskip("onnx", reason="the extra export is not installed")
    path, contract = export(agent_of(form, tmp_path), tmp_path / "out")
    assert contract["check"]["max_difference"] <= TOLERANCE
    model = onnx.load(path)
    assert not {"LSTM", "GRU", "Loop", "Scan"} & {node.op_type for node in model.graph.node}
    (stored,) = (entry.value for entry in model.metadata_props if entry.key == "contract")
    assert json.loads(stored)["inputs"] == contract["inputs"]


@pytest.mark.parametrize(
    "changed",
    [
        lambda obs, state, start: (obs, state, np.zeros(len(start), bool)),  # never resets
        lambda obs, state, start: (obs, state[::-1].copy(), start),  # mixes rows
        lambda obs, state, start: (obs, 0 * state, start),  # forgets
        lambda obs, state, start: (obs + np.float32(1e-3), state, start),
        lambda obs, state, start: (obs * np.nan, state, start),
    ],
)
def test_a_faulty_step_differs(changed, tmp_path):
    agent = agent_of("clstm", tmp_path)
    step = ExportedStep(agent)
    run = in_torch(step)
    assert largest_difference(agent, step, lambda *inputs: run(*changed(*inputs))) > TOLERANCE


def test_what_differs_is_refused_and_removed(tmp_path, untraced, monkeypatch):
    monkeypatch.setattr(command, "largest_difference", lambda *_: 2 * TOLERANCE)
    with pytest.raises(UserError, match="differs") as refused:
        export(agent_of("clstm", tmp_path), tmp_path / "out")
    assert refused.value.exit_code == 1 and not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("form", ["nested actions", "start of choices", "several masked choices"])
def test_what_computes_large_values_may_differ_by_their_rounding(form, tmp_path):
    agent = agent_of(form, tmp_path)
    own = agent.policy.actor_head.weight.data  # [A, H]

    def rounding():
        return 1 + 1e-6 * torch.randn_like(own)

    torch.nn.init.normal_(own, std=1e6)
    own[1::2] = own[:-1:2] * rounding()[1::2]  # every second choice is as good as another
    step, other = ExportedStep(agent), ExportedStep(agent)
    other.policy.actor_head.weight.mul_(rounding())
    assert 1e-8 < largest_difference(agent, step, in_torch(other)) <= TOLERANCE
    other.policy.actor_head.weight.neg_()
    assert largest_difference(agent, step, in_torch(other)) > TOLERANCE


def test_bounds_hold_to_the_last_bit(tmp_path):
    """Also those of a float64 space, which float32 cannot hold."""
    space = spaces.Box(np.array([0.1]), np.array([0.3]), dtype=np.float64)
    agent = agent_of("clstm", tmp_path)
    step = ExportedStep(replace(agent, spaces_json=to_json(VECTOR, space)))
    for bound in (step.low, step.high):
        assert space.contains(bound.double().numpy())
    assert not space.contains(np.array([0.3], np.float32).astype(np.float64))  # rounded up


def test_the_card_of_a_run_names_its_scores(tmp_path, monkeypatch, untraced):
    run_dir = tmp_path / "run"
    flags = ["--env", "Pendulum-v1", "--total_steps", "128", "--eval_episodes", "2", "--seed", "3"]
    assert train_here(monkeypatch, *RECALL, *flags, "--run_dir", run_dir) == 0
    assert run_here(command.main, [run_dir], monkeypatch) == 0
    folder = run_dir / "export" / "onnx"
    contract = json.loads((folder / "contract.json").read_text())
    summary = run_dir / "summary.json"
    tested = json.loads(summary.read_text())
    card = (folder / "README.md").read_text()
    assert "Policy for Pendulum-v1" in card and '"total_steps": 128' in card
    assert f"- return: {tested['test']['return']:.6g}" in card
    summary.write_text(json.dumps(tested | {"iteration": 9}))
    assert "iteration 9, NOT of these" in make_card(load_agent(run_dir), contract)
    summary.unlink()  # as of a run that has not finished
    assert "- return: " not in make_card(load_agent(run_dir), contract)


PREVIOUS = Part("previous_reward", "vector", (1,))
PLAYED = {  # form: what its rows hold besides the observation
    "clstm": (),
    "images": (Part("action_mask", "mask", (4,)), Part("previous_action", "plain", (4,)), PREVIOUS),
    "several masked choices": (Part("previous_action", "plain", (7,)),),
    "start of choices": (PREVIOUS,),
    "nested actions": (Part("previous_action", "plain", (3,)),),
    "windows of images": (Part("previous_action", "plain", (2,)), PREVIOUS),
    "switches": (Part("action_mask", "mask", (8,)),),
}


class Played(gymnasium.Env):
    """Random observations, masks and rewards; `steps` keeps what was shown and done."""

    steps = []

    def __init__(self, form):
        _, self.observation_space, self.action_space = ALL[form]
        self.sizes = ActionDecoder(self.action_space, "here").sizes
        self.observation_space.seed(1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age, self.reward = 0, 0.0
        return self.show()

    def show(self):
        masks = self.np_random.integers(0, 2, int(self.sizes.sum()))
        masks[np.cumsum(self.sizes) - 1] = 1  # the last of every choice
        self.obs, self.masks = self.observation_space.sample(), masks
        if "action_mask" in getattr(self.observation_space, "spaces", ()):
            self.obs["action_mask"] = masks.astype(np.int8)
        return self.obs, {"action_mask": masks}

    def step(self, action):
        self.steps.append((self.age == 0, self.obs, self.masks, self.reward, action))
        self.age, self.reward = self.age + 1, float(self.np_random.normal())
        obs, info = self.show()
        return obs, self.reward, self.age == 11, False, info


if "Played-v0" not in gymnasium.registry:
    gymnasium.register("Played-v0", entry_point=Played, disable_env_checker=True)


@pytest.mark.parametrize("form", few_of({"clstm", "images", "several masked choices"}, PLAYED))
def test_the_cards_code_and_the_example_play_as_the_policy_does(form, tmp_path, monkeypatch):
    pytest.importorskip("onnx", reason="the extra export is not installed")
    from agents.export import play as deployed

    task = TaskConfig(env="Played-v0", env_kwargs=json.dumps({"form": form}))
    agent = agent_of(form, tmp_path, PLAYED[form])
    agent = replace(agent, config=replace(agent.config, task=task))
    export(agent, tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    monkeypatch.syspath_prepend(tmp_path / "out")
    monkeypatch.delitem(sys.modules, "play", raising=False)
    code = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    asked = {part.name for part in PLAYED[form]}
    policy = LoadedPolicy(agent)
    for play in (
        lambda: exec(compile(code.replace("range(1000)", "range(40)"), "card", "exec"), {}),
        lambda: deployed.main(tmp_path / "out"),
    ):
        Played.steps.clear()
        play()
        assert len(Played.steps) >= 33
        state = None
        for begins, obs, masks, reward, action in Played.steps:
            more = {"reward": reward} if "previous_reward" in asked else {}
            more |= {"action_masks": masks} if "action_mask" in asked else {}
            expected, state = policy.predict(obs, state, np.array([begins]), **more)
            assert policy.action_space.contains(action)
            flat = [spaces.flatten(policy.action_space, each) for each in (action, expected)]
            np.testing.assert_allclose(*flat, rtol=1e-4, atol=1e-5)


def test_a_missing_runtime_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as if it were not installed
    monkeypatch.setattr(command, "load_agent", lambda *_, **__: agent_of("clstm", tmp_path))
    arguments = [tmp_path, "--output", tmp_path / "out"]
    assert run_here(command.main, arguments, monkeypatch) == 2
    assert "clstm-ppo[export]" in only_error(capsys.readouterr().err)
