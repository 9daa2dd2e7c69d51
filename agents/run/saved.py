"""Load checkpoints as trained policies, as initial weights, or to resume a run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from gymnasium import spaces

from agents.config import RunConfig, empty_policy
from agents.learner.checkpoint_schema import RunSchema
from agents.learner.network.inputs import Normalizer, Normalizers
from agents.learner.policy import Policy
from agents.learner.rollout import fresh_carry
from agents.learner.settings import TrainConfig
from agents.learner.trainer import InitialWeights
from envs.task import Counts
from envs.vector.layout import Layout
from envs.vector.space_json import from_json
from envs.vector.spaces import ActionDecoder, ObservationEncoder
from rl_dist.checkpoint.content import FitSchema, Schema, State, tensors_in
from rl_dist.checkpoint.store import (
    BEST_FILE,
    CHECKPOINT_DIR,
    LoadedCheckpoint,
    checkpoint_files,
    checkpoint_folder,
    iteration_in_name,
    load_checkpoint,
    load_latest,
    write_atomically,
)
from rl_dist.checkpoint.trust import check_named
from rl_dist.errors import UserError, one_line
from rl_dist.process_group.collectives import all_gather_json, broadcast_bytes
from rl_dist.process_group.world import World
from rl_dist.run_dir import RunDir
from rl_dist.strategies.precision import low_precision

FEATURES = "feature LSTM"  # marks checkpoints written by agents.pretrain
FEATURE_PARTS = ("feature_core.", "feature_mlp.")
MOMENTS = ("normalizer.moments.mean", "normalizer.moments.variance")
Which = Literal["last", "best", ""]  # checkpoint of a run; "": see `load_saved`


# ---- files


def load_saved(
    path: str | Path, which: Which = "last", schema: type[Schema] = RunSchema
) -> LoadedCheckpoint:
    """Load a checkpoint from its file or from a run directory.

    Args:
        path: the file or the run directory.
        which: checkpoint to load from a run directory: best is best.pt, last is the newest valid
            checkpoint, and "" is best.pt if it exists, otherwise the newest valid checkpoint.
        schema: schema of the program that must have written the checkpoint.

    Raises:
        CheckpointError: the file cannot be read, or is not a checkpoint.
        UserError: the directory holds no valid checkpoint, or another program has written it.
    """
    path = Path(path)
    best = checkpoint_folder(path) / BEST_FILE
    if path.is_dir() and (which == "best" or (not which and best.exists())):
        path = best
    if path.is_dir():
        loaded = load_latest(path, schema)
    else:
        loaded = LoadedCheckpoint(path, load_checkpoint(path, schema))
    if loaded is None:
        raise UserError(
            f"{path} holds no valid checkpoint: run python -m rl_dist.checkpoint verify {path}"
        )
    if not schema.describes(loaded.state):
        raise UserError(
            f"{loaded.path} is not a checkpoint of {schema.program}: "
            "give such a file or a run directory"
        )
    return loaded


def load_newest(run_dir: Path) -> LoadedCheckpoint | None:
    """Load the newest valid checkpoint of a run; None if there are no checkpoints.

    If all checkpoints are damaged, this raises a UserError, because a new run would overwrite them.
    """
    return load_saved(run_dir) if checkpoint_files(run_dir) else None


def share_checkpoint(directory: RunDir, offers: list[str], world: World) -> str:
    """Choose the newest checkpoint that a rank offers; copy this file to hosts that do not have it.

    Every rank must call this. If rank 0 has a file but does not offer it, the file of rank 0 is
    damaged. Therefore, an offer of another rank is valid only if rank 0 has no file of this name.

    Args:
        offers: for each rank, the path of the checkpoint that it would load; "" if it has none.

    Returns:
        The path of the chosen checkpoint; "" if no rank offers one.
    """

    def newness(rank: int) -> int:
        path = Path(offers[rank])
        is_valid = path.parent == directory.checkpoints and (rank == 0 or not path.exists())
        # best.pt gets -1, because its name contains no iteration. An invalid offer gets even less.
        return iteration_in_name(path) if is_valid else -2

    # Ranks may see different files, so all ranks use the choice of rank 0.
    owner = all_gather_json(max(range(world.size), key=newness), world)[0]
    path = Path(offers[owner])
    if offers[owner] and any(all_gather_json(not path.exists(), world)):
        data = broadcast_bytes(path.read_bytes() if world.rank == owner else b"", owner, world)
        if world.local_rank == 0 and not path.exists():
            write_atomically(path, data)
        all_gather_json("written", world)  # wait until every host has the file
    return offers[owner]


# ---- trained policies


@dataclass(frozen=True)
class LoadedAgent:
    """A trained policy with the normaliser of its observations."""

    policy: Policy
    normalizer: Normalizer
    config: RunConfig
    iteration: int
    path: Path
    directory: RunDir  # run directory; for a copied checkpoint, the folder that contains it
    spaces_json: str  # the environment's spaces as JSON; "" for the trading environment
    counts: Counts  # how long the policy was trained
    obs: torch.Tensor  # [B, F] the environments' last observations in training

    @property
    def spaces(self) -> tuple[spaces.Space, spaces.Space]:
        """Return the observation and action space of the environment.

        For the trading environment, these are the spaces of the policy's inputs and actions.
        """
        if self.spaces_json:
            return from_json(self.spaces_json)
        high = np.full(self.policy.num_obs, np.inf, np.float32)
        return spaces.Box(-high, high), spaces_of(self.policy.shapes())[1]

    def encoder(self) -> ObservationEncoder:
        """Return the encoder that turns environment observations into policy inputs."""
        observation, action = self.spaces
        decoder = ActionDecoder(action, "of this policy")
        return ObservationEncoder(observation, "of this policy", decoder)


def load_agent(
    path: str | Path,
    device: str | torch.device = "cpu",
    which: Which = "last",
    core: str | None = None,
    encoder: str | None = None,
) -> LoadedAgent:
    """Load a trained policy from a checkpoint or run directory.

    Args:
        which: checkpoint to load from a run directory: last, best, or "" for the best if it exists.
            For runs on real prices, "" loads the last, because validation on real prices is too
            noisy to choose the best.
        core: module:Class of the run's core; needed if another user owns the run's config.json.
        encoder: the same for the run's encoder.
    """
    file, state = load_saved(path, which)
    config = RunConfig.from_dict(json.loads(state["config"]))
    if not which and not config.trusts_best and Path(path).is_dir():
        file, state = load_saved(path)
    folder = file.absolute().parent
    directory = RunDir(folder.parent if folder.name == CHECKPOINT_DIR else folder)
    for name, given in {"core": core, "encoder": encoder}.items():
        check_named(directory.path, "policy", {name: config.values[name]}, given)
    check_shapes(state, config)
    layout, action_space = spaces_of(state)
    policy = Policy(config.policy, layout, action_space).to(config.launch.dtype)
    policy.low_precision = low_precision(config.launch.precision)
    policy.load_state_dict(state["policy"])
    normalizers = Normalizers(layout, scale_obs=config.train.normalize_obs, scale_rewards=False)
    normalizers.load_state_dict(state["normalizers"])
    return LoadedAgent(
        policy.to(device),
        normalizers.obs.to(device),
        config,
        state["iteration"],
        file,
        directory,
        state["spaces"],
        Counts(global_step=state["global_step"], episodes=state["episodes"]),
        state["carry"]["obs"],
    )


# ---- initial weights


def initial_weights(config: TrainConfig) -> InitialWeights | None:
    """Read the weights of --init_from or --pretrained; None if neither is given.

    In a run directory, the best checkpoint is read. The statistics of a pre-trained LSTM contain no
    sample count, so the new run keeps the sample count of its warm-up.
    """
    if config.init_from:
        _, state = load_saved(config.init_from, "")
        return InitialWeights(state["policy"], state["normalizers"])
    if not config.pretrained:
        return None
    file, state = load_saved(config.pretrained, "", FitSchema)
    module = state["module"]
    if state["extra"].get("kind") != FEATURES:
        raise UserError(f"{file} holds no feature LSTM: use one from python -m agents.pretrain")
    return InitialWeights(
        {name: value for name, value in module.items() if name.startswith(FEATURE_PARTS)},
        {name.replace("normalizer.", "obs."): module[name] for name in MOMENTS},
        FEATURE_PARTS,
    )


def check_initial(config: TrainConfig, policy: Policy) -> None:
    """Raise a UserError if weights or statistics of --init_from or --pretrained do not fit."""
    if initial := initial_weights(config):
        weights = policy.state_dict()
        others = {name: weights[name] for name in weights if not name.startswith(initial.parts)}
        normalizers = Normalizers(policy.layout, scale_obs=False, scale_rewards=False)
        try:
            policy.load_state_dict(others | initial.weights, assign=True)
            normalizers.load_state_dict(normalizers.state_dict() | initial.moments)
        except RuntimeError as error:
            raise UserError(
                f"the checkpoint does not fit: {one_line(error)}; use the environment, "
                "--observation, --policy and --hidden_size that it was trained with"
            ) from error


# ---- comparisons


def differences(now: Mapping[str, object], before: Mapping[str, object]) -> list[str]:
    """Describe each value in `now` that differs from the checkpoint's value in `before`.

    A missing value is described as None.
    """
    values = [(name, now.get(name), before.get(name)) for name in sorted({*now, *before})]
    return [f"{name} {new} (the checkpoint has {old})" for name, new, old in values if new != old]


def spaces_of(state: State) -> tuple[Layout, spaces.Space]:
    """Return the observation layout and the action space stored in a checkpoint."""
    layout = Layout.from_json(state["layout"])
    size = state["num_actions"]
    if sizes := state["action_sizes"]:
        return layout, spaces.MultiDiscrete(sizes)
    return layout, spaces.Discrete(size) if state["discrete"] else spaces.Box(-1, 1, (size,))


def check_shapes(state: dict, config: RunConfig) -> None:
    """Raise a UserError if tensors of a checkpoint do not fit its configuration."""
    try:
        layout, action_space = spaces_of(state)
        policy = empty_policy(config, layout, action_space)
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        # Adam's fused kernel does not check shapes: tensors of a wrong shape would corrupt memory.
        moments = {
            number: {
                "step": torch.zeros(()),
                "exp_avg": trained[number],
                "exp_avg_sq": trained[number],
            }
            for number in state["optimizer"]["state"]
        }
        expected = {
            "policy": policy.state_dict(),
            "carry": vars(fresh_carry(policy, state["carry"]["obs"].to("meta"))),
            "normalizers": Normalizers(layout, scale_obs=False, scale_rewards=False).state_dict(),
            "optimizer": {"state": moments},
        }
        saved = {name: state[name] for name in expected}
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise UserError(f"the checkpoint is damaged: {one_line(error)}") from error
    if problems := differences(_shapes_and_types(expected), _shapes_and_types(saved)):
        raise UserError(f"the checkpoint is damaged: {problems[0]}")


def _shapes_and_types(state: dict) -> dict[str, str]:
    """Return the shape and type of each tensor in nested dicts, by path."""
    return {
        path: f"{list(value.shape)} of {value.dtype}" for path, value in tensors_in(state).items()
    }
