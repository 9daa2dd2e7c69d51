"""The agents in saved runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from agents.config import RunConfig, TrainConfig, probe
from agents.network.inputs import Normalizer, observation_normalizer
from agents.policy import Policy, PolicyConfig
from agents.rollout import fresh_carry
from envs.vector.layout import Layout
from envs.vector.spaces import ActionDecoder, ObservationEncoder, from_json
from rl_dist.checkpoint.spec import FIT, MEASURED, RUN, kind_of
from rl_dist.checkpoint.store import (
    BEST_FILE,
    CHECKPOINT_DIR,
    Found,
    checkpoint_folder,
    iteration_in_name,
    load_checkpoint,
    load_latest,
    write_atomically,
)
from rl_dist.checkpoint.trust import check_named
from rl_dist.errors import UserError, printable
from rl_dist.process_group.collectives import all_gather_json, broadcast_bytes
from rl_dist.process_group.world import World
from rl_dist.run_dir import RunDir, runs_below
from rl_dist.strategies.precision import autocast_dtype

if TYPE_CHECKING:
    from envs.task import GymTask
    from envs.trading.task import TradingTask


FEATURES = "feature LSTM"  # in checkpoints of agents.pretrain
FEATURE_PARTS = ("feature_core.", "feature_mlp.")
MOMENTS = ("normalizer.moments.mean", "normalizer.moments.variance")
Which = Literal["last", "best", ""]  # checkpoint of a run


def load_saved(path: str | Path, which: Which = "last", kind: str = RUN) -> Found:
    """Load a checkpoint file, or one of a run directory; refuse where there is none.

    Args:
        which: the newest valid one, or the best; "": the best if there is one, else the newest.
    """
    path = Path(path)
    if path.is_dir() and which != "last":
        best = checkpoint_folder(path) / BEST_FILE
        if best.exists():
            return _of_kind(Found(best, load_checkpoint(best)), kind)
        if which == "best":
            raise UserError(f"{path} has no best checkpoint: take --which last, the newest")
    if path.is_dir():
        found = load_latest(path)
        if found is None:
            fix = runs_below(path) or "give the directory of a run"
            raise UserError(f"{path} holds no valid checkpoint: {fix}")
    elif path.exists():
        found = Found(path, load_checkpoint(path))
    else:
        raise UserError(f"{path} does not exist: give a run directory or a checkpoint file")
    return _of_kind(found, kind)


def load_newest(run_dir: Path) -> Found | None:
    """Load the newest valid checkpoint of a run; None where there are none at all.

    Checkpoints of which none is valid are refused: a fresh start would overwrite them.
    """
    newest = load_latest(run_dir)
    if newest is None and any((run_dir / CHECKPOINT_DIR).glob("*.pt")):
        raise UserError(
            f"{run_dir} holds checkpoints, but none is valid: see python -m rl_dist.checkpoint "
            f"verify {run_dir}; move them away to begin again"
        )
    return newest and _of_kind(newest, RUN)


def _of_kind(found: Found, kind: str) -> Found:
    if kind_of(found.state) != kind:
        raise UserError(f"{found.path} is no checkpoint of {kind}: name one, or its run directory")
    return found


@dataclass(frozen=True)
class LoadedAgent:
    """A trained policy with its normaliser, ready to act."""

    policy: Policy
    normalizer: Normalizer
    config: RunConfig
    iteration: int
    path: Path
    run_dir: Path  # of its run, or where the checkpoint was copied to
    spaces_json: str = ""  # of its environment; "": unknown
    chosen_by: str = ""  # in words, where it is the best checkpoint and not the newest
    global_step: int = 0  # environment steps of all ranks
    measured: Mapping[str, float] = field(default_factory=dict)  # by which the best is chosen

    @property
    def spaces(self) -> tuple[spaces.Space, spaces.Space]:
        """The spaces of its environment, or of markets and old checkpoints the learner's."""
        if self.spaces_json:
            return from_json(self.spaces_json)
        high = np.full(self.policy.num_obs, np.inf, np.float32)
        return spaces.Box(-high, high), spaces_of(self.policy.shapes())[1]

    def encoder(self) -> ObservationEncoder:
        """Return what makes rows of observations; refuse other rows than in training."""
        observation, action = self.spaces
        sizes = ActionDecoder(action, "of this policy").sizes.tolist()
        encoder = ObservationEncoder(observation, "of this policy", sizes)
        if self.spaces_json:
            extras = self.policy.layout.parts[len(encoder.parts) :]
            check_readable(self.policy, Layout((*encoder.parts, *extras)))
        return encoder


def load_agent(
    path: str | Path,
    device: str | torch.device = "cpu",
    which: Which = "last",
    core: str | None = None,
) -> LoadedAgent:
    """Load a policy from a checkpoint or run directory, wherever it was trained.

    Args:
        which: checkpoint of a run directory: the newest, or the best; "": the best if there is one,
            but the newest of runs on real prices, whose validation is too noisy to choose by.
        core: the module:Class of a run whose config.json is not the user's own, repeated.
    """
    file, state = load_saved(path, which)
    config = RunConfig.from_dict(json.loads(state["config"]))
    if not which and config.data.data != "simulated" and Path(path).is_dir():
        file, state = load_saved(path, "last")
    folder = file.absolute().parent
    run_dir = folder.parent if folder.name == CHECKPOINT_DIR else folder
    check_named(run_dir, "policy", {"core": config.policy.core}, core)
    check_shapes(state, config.policy, config.launch.dtype)
    layout, action_space = spaces_of(state)
    policy = Policy(config.policy, layout, action_space).to(config.launch.dtype)
    policy.low_precision = autocast_dtype(config.launch.precision)
    policy.load_state_dict(state["policy"])
    normalizer = observation_normalizer(layout, config.train.normalize_obs)
    normalizer.load_state_dict(state["obs_normalizer"])
    measured, chosen_by = state.get(MEASURED) or {}, ""
    if Path(path).is_dir() and file.name == BEST_FILE:
        best_by = (f", the best by {name} {value:.4g}" for name, value in measured.items())
        chosen_by = printable("".join(best_by))
    return LoadedAgent(
        policy.to(device),
        normalizer.to(device),
        config,
        state["iteration"],
        file,
        run_dir,
        state.get("spaces", ""),
        chosen_by,
        state["global_step"],
        measured,
    )


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """Weights that a new run begins with, and statistics that belong to them."""

    weights: dict[str, Tensor]  # by their names in the policy
    parts: tuple[str, ...] = ("",)  # prefixes of the names of these weights; the others stay
    obs: dict[str, Tensor]  # of normalisers' states; what is missing stays
    rewards: dict[str, Tensor] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)  # settings that the run must share

    def load_into(self, policy: Policy) -> None:
        """Give a fresh policy the weights."""
        policy.load_state_dict(policy.state_dict() | self.weights)

    def set_moments(self, obs: Normalizer, rewards: Normalizer) -> None:
        """Set the statistics, which move on from there."""
        obs.load_state_dict(obs.state_dict() | self.obs)
        rewards.load_state_dict(rewards.state_dict() | self.rewards)


def initial_weights(config: TrainConfig) -> InitialWeights | None:
    """Read the weights that --init_from or --pretrained names; None: random ones.

    A directory means its best checkpoint. Statistics of a pre-training weigh as much as those that
    the normaliser has seen by itself.
    """
    if config.init_from:
        _, state = load_saved(config.init_from, "")
        moments = {"obs": state["obs_normalizer"], "rewards": state["reward_normalizer"]}
        return InitialWeights(weights=state["policy"], **moments)
    if not config.pretrained:
        return None
    file, state = load_saved(config.pretrained, "", FIT)
    module, extra = state["module"], state["extra"]
    shapes = {name: list(module[name].shape) for name in MOMENTS if name in module}
    if extra.get("kind") != FEATURES or shapes != dict.fromkeys(MOMENTS, [extra.get("num_obs")]):
        raise UserError(f"{file} is no feature LSTM: name a run of python -m agents.pretrain")
    return InitialWeights(
        weights={name: value for name, value in module.items() if name.startswith(FEATURE_PARTS)},
        parts=FEATURE_PARTS,
        obs={name.removeprefix("normalizer."): module[name] for name in MOMENTS},
        needs={name: extra.get(name) for name in ("observation", "num_obs", "hidden_size")},
    )


def check_initial(config: RunConfig, task: TradingTask | GymTask) -> None:
    """Refuse --init_from or --pretrained that does not fit the run."""
    train = config.train
    flag = (
        f"--init_from {train.init_from}" if train.init_from else f"--pretrained {train.pretrained}"
    )
    try:
        initial = initial_weights(train)
        if initial is None:
            return
        policy = probe(task).empty_policy(config)
        here = config.values | {"num_obs": policy.num_obs}
        for name, value in initial.needs.items():
            if here[name] != value:
                raise UserError(f"{name} {here[name]} does not fit (it has {value}): use {value}")
        if train.pretrained and not train.normalize_obs:
            raise UserError("it needs normalised observations: omit --no-normalize_obs")
        others = {
            name: value
            for name, value in policy.state_dict().items()
            if not name.startswith(initial.parts)
        }
        check_weights(policy, others | initial.weights)
    except UserError as error:
        raise UserError(f"{flag}: {error}") from None


def spaces_of(state: Mapping[str, Any]) -> tuple[Layout, spaces.Space]:
    """Return the layout of observations and the space of actions of a checkpoint."""
    layout = Layout.from_json(state["layout"])
    if layout.size != state["num_obs"]:
        raise UserError(
            f"the checkpoint is damaged: its layout has {layout.size} numbers, not num_obs "
            f"{state['num_obs']}"
        )
    number = state["num_actions"]
    if sizes := state["action_sizes"]:
        return layout, spaces.MultiDiscrete(sizes)
    return layout, spaces.Discrete(number) if state["discrete"] else spaces.Box(-1, 1, (number,))


def check_weights(policy: Policy, weights: dict[str, Tensor]) -> None:
    """Refuse weights that do not fit a policy; name the first difference."""
    expected = {name: tuple(value.shape) for name, value in policy.state_dict().items()}
    saved = {name: tuple(value.shape) for name, value in weights.items()}
    for name in sorted(expected.keys() | saved.keys()):
        here, there = expected.get(name, "absent"), saved.get(name, "absent")
        if here != there:
            raise UserError(
                f"the checkpoint is of another shape: {name} is {there} there and {here} here; use "
                "the environment, --observation, --policy and --hidden_size it was trained with"
            )


def check_readable(policy: Policy, now: Layout) -> None:
    """Refuse observations whose parts differ from those in the training."""
    trained = policy.layout.kinds()
    if now.kinds() != trained:
        raise UserError(
            f"the policy was trained on observations of parts {trained:.200}, but these "
            f"have parts {now.kinds():.200}: use the environment and version it was trained with"
        )


def check_shapes(state: dict[str, Any], config: PolicyConfig, dtype: torch.dtype) -> None:
    """Refuse a checkpoint whose shapes do not match its configuration."""
    with torch.device("meta"):
        policy = Policy(config, *spaces_of(state)).to(dtype)
    check_weights(policy, state["policy"])
    carry = state["carry"]
    for name, like in fresh_carry(policy, carry["obs"].to("meta")).tensors().items():
        if name not in carry or (carry[name].shape, carry[name].dtype) != (like.shape, like.dtype):
            raise UserError(
                f"the checkpoint is damaged: carry {name!r} is not {list(like.shape)} of "
                f"{like.dtype}"
            )


def share_checkpoint(directory: RunDir, offers: list[str], world: World) -> str:
    """Return the newest of the ranks' checkpoints; hosts that lack it get a copy.

    Another rank's choice counts only where rank 0 has no such file: else it has refused it.
    """

    def newness(rank: int) -> int:
        path = Path(offers[rank])
        counts = path.parent == directory.checkpoints and (rank == 0 or not path.exists())
        return iteration_in_name(path) if counts else -2

    owner = all_gather_json(max(range(world.size), key=newness), world)[0]
    path = Path(offers[owner])
    if offers[owner] and any(all_gather_json(not path.exists(), world)):
        data = broadcast_bytes(path.read_bytes() if world.rank == owner else b"", owner, world)
        if world.local_rank == 0 and not path.exists():
            write_atomically(path, data)
        all_gather_json("written", world)
    return offers[owner]
