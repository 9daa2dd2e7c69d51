"""A feature LSTM trained before PPO: what agents.pretrain writes, and its use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from gymnasium import spaces
from torch import Tensor, nn

from agents.normalize import Normalizer
from agents.policy import Policy, PolicyConfig
from agents.run.config import RunConfig, glance
from envs.task import GymTask
from envs.trading.task import TradingTask
from rl_dist.checkpoint.file import load_checkpoint
from rl_dist.checkpoint.folder import BEST_FILE, CHECKPOINT_DIR, latest_checkpoint
from rl_dist.checkpoint.schema import FIT, kind_of
from rl_dist.errors import UserError

KIND = "feature LSTM"  # in a checkpoint's "extra": what was trained
PARTS = ("feature_core.", "feature_mlp.")


class FeatureTraining(nn.Module):
    """The policy's feature LSTM with a head that tells what comes next.

    Maps observations [N, days, F], not normalised, to [N, days, 2, n]: a logit that each of n stocks rises the next
    day, and its standardised log volatility; after every day from the window up to it.
    """

    def __init__(self, policy: Policy, num_stocks: int) -> None:
        super().__init__()
        self.normalizer = Normalizer(policy.num_obs)
        self.feature_core, self.feature_mlp = policy.feature_core, policy.feature_mlp
        self.head = nn.Linear(policy.config.hidden_size, 2 * num_stocks)

    def forward(self, obs: Tensor) -> Tensor:
        """See the class."""
        normal = self.normalizer(obs).to(self.head.weight.dtype).transpose(0, 1)
        features = self.feature_mlp(self.feature_core(normal.contiguous())[0])
        return self.head(features).transpose(0, 1).unflatten(2, (2, -1))


@dataclass(frozen=True)
class Pretrained:
    """A trained feature LSTM, and the statistics of the observations it saw."""

    path: Path
    weights: dict[str, Tensor]  # by their names in the policy
    mean: Tensor  # [F]
    variance: Tensor  # [F]
    observation: str
    num_obs: int
    hidden_size: int

    def check(self, policy: PolicyConfig, num_obs: int, observation: str, *, normalize_obs: bool) -> None:
        """Refuse what it does not fit.

        Raises:
            UserError: names everything that differs.
        """
        if policy.stateless:
            raise UserError("--pretrained gives a feature LSTM, and a policy without memory has no use for it")
        if not normalize_obs:
            raise UserError("--pretrained needs normalised observations, as it was trained on: drop --no-normalize_obs")
        compared = {
            "observation": (observation, self.observation),
            "observation size": (num_obs, self.num_obs),
            "hidden_size": (policy.hidden_size, self.hidden_size),
        }
        differing = [f"{name} {here} (it has {there})" for name, (here, there) in compared.items() if here != there]
        if differing:
            raise UserError(f"--pretrained {self.path} does not fit: {', '.join(differing)}; use what it has")
        with torch.device("meta"):
            own = Policy(policy, num_obs, spaces.Discrete(1)).state_dict()
        expected = {name: value.shape for name, value in own.items() if name.startswith(PARTS)}
        moments = {"mean": self.mean, "variance": self.variance}
        expected |= dict.fromkeys(moments, torch.Size([num_obs]))
        if {name: value.shape for name, value in (self.weights | moments).items()} != expected:
            raise UserError(f"--pretrained {self.path} is damaged: its weights are not as large as it says")

    def load_into(self, policy: Policy) -> None:
        """Give a fresh policy the weights; the rest of it stays as it is."""
        policy.load_state_dict(policy.state_dict() | self.weights)

    def set_moments(self, normalizer: Normalizer) -> None:
        """Let observations mean what they meant while the weights were learned.

        The statistics weigh as much as what the normaliser has seen so far, and move on from there.
        """
        normalizer.moments.mean.copy_(self.mean)
        normalizer.moments.variance.copy_(self.variance)


def load_pretrained(path: str | Path) -> Pretrained:
    """Read what pre-training wrote.

    `path` is its run directory, of which the best epoch counts, or a checkpoint file.

    Raises:
        UserError, CheckpointError: there is nothing valid, or it is something else.
    """
    path = Path(path)
    file: Path | None = path
    if path.is_dir():
        best = path / CHECKPOINT_DIR / BEST_FILE
        file = best if best.exists() else latest_checkpoint(path)
    if file is None or not file.exists():
        raise UserError(f"--pretrained {path} holds no checkpoint: give a directory that agents.pretrain wrote")
    state = load_checkpoint(file)
    module, extra = state.get("module", {}), state.get("extra", {})
    needed = {"normalizer.moments.mean", "normalizer.moments.variance"} <= module.keys()
    if kind_of(state) != FIT or extra.get("kind") != KIND or not needed:
        raise UserError(f"--pretrained {path} holds no pre-trained feature LSTM: python -m agents.pretrain writes one")
    return Pretrained(
        path=file,
        weights={name: value for name, value in module.items() if name.startswith(PARTS)},
        mean=module["normalizer.moments.mean"],
        variance=module["normalizer.moments.variance"],
        observation=extra.get("observation"),
        num_obs=extra.get("num_obs"),
        hidden_size=extra.get("hidden_size"),
    )


def check_pretrained(config: RunConfig, task: TradingTask | GymTask) -> None:
    """Compare --pretrained with the run, before anything is written.

    Raises:
        UserError, CheckpointError: it does not fit, or is none.
    """
    if not isinstance(task, TradingTask):
        raise UserError(f"--pretrained was trained on markets and does nothing with --env {config.task.env}")
    env = glance(task)
    num_obs = int(env.single_observation_space.shape[0])
    env.close()
    found = load_pretrained(config.train.pretrained)
    found.check(config.policy, num_obs, config.trading.observation, normalize_obs=config.train.normalize_obs)
