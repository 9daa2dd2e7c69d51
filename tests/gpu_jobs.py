"""Small trainings on a device, for the tests of GPUs and of their rehearsal."""

import functools
from dataclasses import replace

from agents_ranks import CASES, make_job, tiny_markets

from envs import make_vector_env
from envs.trading.environment import TradingVectorEnv
from envs.trading_config import TradingConfig
from rl_dist.parallel.config import SpeedConfig, StrategyConfig

TRADING, CARTPOLE = "trading, clstm", "cartpole, clstm"


def make_env_on(device, task, num_envs, env_offset=0):
    """Trading, whose tensors live on the device, or an environment of the host."""
    if task == "trading":
        markets, span = tiny_markets()
        config = TradingConfig(episode_days=7)
        setup = {"markets": markets, "span": span, "train_span": span, "config": config}
        return TradingVectorEnv(num_envs, **setup, device=device)
    return make_vector_env("CartPole-v1", num_envs, env_offset=env_offset, device=device)


def job_on(device, name=TRADING, run_dir="", *, fused_adam="auto", strategy=None, **options):
    """A job of `agents_ranks` whose environments are on a device.

    Args:
        strategy: fields of StrategyConfig.
    """
    return replace(
        make_job(name, run_dir, **options),
        make_env=functools.partial(make_env_on, device, CASES[name].task),
        strategy=StrategyConfig(**(strategy or {})),
        speed=SpeedConfig(fused_adam=fused_adam),
    )
