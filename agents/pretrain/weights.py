"""A feature LSTM trained before PPO: its checkpoints, and their use in a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from agents.config import RunConfig, probe
from agents.network.inputs import Normalizer
from agents.policy import Policy
from agents.run.saved import InitialWeights, load_saved
from envs.task import GymTask
from envs.trading.task import TradingTask
from rl_dist.checkpoint.spec import FIT
from rl_dist.errors import UserError

KIND = "feature LSTM"  # in a checkpoint's "extra": what was trained
PARTS = ("feature_core.", "feature_mlp.")
MOMENTS = ("normalizer.moments.mean", "normalizer.moments.variance")


class FeatureTraining(nn.Module):
    """The policy's feature LSTM with a head that predicts the next days.

    Maps observations [N, days, F], not normalised, to [N, days, 2, n]: after every day of a window,
    for each of n stocks, a logit that it rises the next day and its standardised log volatility.
    """

    def __init__(self, policy: Policy, num_stocks: int) -> None:
        super().__init__()
        self.normalizer = Normalizer(policy.num_obs)
        self.feature_core = policy.feature_core
        self.feature_mlp = policy.feature_mlp
        self.head = nn.Linear(policy.config.hidden_size, 2 * num_stocks)

    def forward(self, obs: Tensor) -> Tensor:
        """See the class."""
        normal = self.normalizer(obs).to(self.head.weight.dtype).transpose(0, 1)
        state = normal.new_zeros(
            self.feature_core.num_states, normal.shape[1], self.feature_core.hidden_size
        )
        features = self.feature_mlp(self.feature_core(normal.contiguous(), state)[0])
        return self.head(features).transpose(0, 1).unflatten(2, (2, -1))


def load_pretrained(path: str | Path) -> tuple[InitialWeights, dict[str, Any]]:
    """Read a checkpoint file of pre-training, or the best one of its run directory.

    Returns:
        The weights, with statistics of observations that weigh as much as what the normaliser has
        seen so far; and observation, num_obs and hidden_size.
    """
    try:
        file, state = load_saved(path, "", FIT)
    except UserError as error:
        fix = "name a run of python -m agents.pretrain"
        raise UserError(f"--pretrained {path} cannot be used ({error}): {fix}") from None
    module, extra = state["module"], state["extra"]
    if extra.get("kind") != KIND or not module.keys() >= set(MOMENTS):
        raise UserError(
            f"--pretrained {path} is no feature LSTM: python -m agents.pretrain writes one"
        )
    weights = {name: value for name, value in module.items() if name.startswith(PARTS)}
    moments = {name.removeprefix("normalizer."): module[name] for name in MOMENTS}
    return InitialWeights(file, weights, moments, {}), extra


def check_pretrained(config: RunConfig, task: TradingTask | GymTask) -> None:
    """Compare --pretrained with the run, before anything is written."""
    if not isinstance(task, TradingTask):
        raise UserError(f"--pretrained is of markets and does nothing with --env {config.task.env}")
    found, extra = load_pretrained(config.train.pretrained)
    if config.policy.stateless:
        raise UserError("--pretrained is a feature LSTM: a policy without memory has no use for it")
    if not config.train.normalize_obs:
        raise UserError("--pretrained needs normalised observations: drop --no-normalize_obs")
    num_obs = probe(task).layout.size
    here = {"observation": config.trading.observation, "num_obs": num_obs}
    here["hidden_size"] = config.policy.hidden_size
    for name, value in here.items():
        if value != extra.get(name):
            raise UserError(
                f"--pretrained {found.path} does not fit: {name} {value} "
                f"(it has {extra.get(name)}); use what it has"
            )

    # the file may say one thing and hold another
    with torch.device("meta"):
        own = Policy(config.policy, num_obs, spaces.Discrete(1)).state_dict()
    expected = {name: value.shape for name, value in own.items() if name.startswith(PARTS)}
    expected |= {name: torch.Size([num_obs]) for name in found.obs}
    if {name: value.shape for name, value in (found.weights | found.obs).items()} != expected:
        raise UserError(f"--pretrained {found.path} is damaged: its weights have other shapes")
