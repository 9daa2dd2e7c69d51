"""The task of a user's batch of environments, which one function makes for a whole rank."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor
from torch.utils._pytree import tree_leaves

from envs import making, own_maker
from envs.gym_task import GymTask
from envs.task import (
    Agent,
    EvaluationOptions,
    RunAgent,
    TaskConfig,
    TaskSettings,
    TrainedAgent,
    TrainedAgents,
    Trial,
)
from envs.vector.adapter import TorchVectorEnv
from envs.vector.layout import TorchEnv
from envs.vector.same_step import (
    SameStep,
    action_space_of,
    actor_part,
    argument_names,
    autoreset_mode,
    find_seed_form,
    resets_by_mask,
    seed_generators,
    space_of,
)
from envs.vector.tensor_batch import TensorBatch
from rl_dist.errors import UserError
from rl_dist.files import log_once

UNUSED = ("env_workers", "env_restarts", "info_mask", "previous_action", "previous_reward")


@dataclass(frozen=True)
class BatchTask(GymTask):
    """Trains on the batch of environments that the function or class of --env makes.

    A process makes one batch and keeps it, because many simulators allow only one. Therefore, there
    is no validation, and the final test uses the environments of the training.
    """

    made: list[TorchEnv] = field(default_factory=list)  # the batch of this process, if any

    metrics = ()  # type: ignore[assignment]  # there is no validation
    can_probe = False

    def __post_init__(self) -> None:
        config = self.settings.task
        for name in UNUSED:
            if getattr(config, name) != getattr(TaskConfig(), name):
                raise ValueError(
                    f"{name} has no effect on the batch that {config.env} makes: omit it"
                )

    def describe(self) -> str:
        """Return lines with the name and arguments of the batch, and what it implies."""
        return (
            f"{super().describe()} (a batch)\nno validation, because a process makes one batch; "
            "the final test steps the environments of the training"
        )

    def training_env(self, num_envs: int, env_offset: int = 0) -> TorchEnv:
        """Make the batch of this process, or return it if it exists."""
        if not self.made:
            self.made.append(make_batch(self.settings, num_envs, env_offset))
        return self.made[0]

    def release(self, env: TorchEnv) -> None:
        """Keep the batch, because the final test uses it."""

    def close(self) -> None:
        """Close the batch of this process, if any."""
        while self.made:
            self.made.pop().close()

    def try_evaluation_env(self, env_offset: int) -> None:
        """Do nothing, because evaluation makes no other environments."""

    def validation(self, agent: TrainedAgent, options: EvaluationOptions) -> None:
        """Return None: there is no validation."""

    def tests(self, agents: TrainedAgents, options: EvaluationOptions) -> dict[str, Trial]:
        """Return the test episodes, which take turns in the environments."""
        if options.video:
            raise UserError("--video needs single environments, not a batch: omit it")
        trial = super().tests(agents, options)["episodes"]
        return {"episodes": replace(trial, run=partial(self._in_turns, trial.run))}

    def _in_turns(self, run: RunAgent, agent: Agent, numbers: range) -> dict[str, list]:
        """Run episodes, at most one in each environment at a time."""
        size = self.training_env(len(numbers), numbers.start).num_envs
        turns = [run(agent, numbers[i : i + size]) for i in range(0, len(numbers), size)]
        return {name: [value for turn in turns for value in turn[name]] for name in turns[0]}

    def evaluation_env(self, num_envs: int, env_offset: int) -> TorchEnv:
        """Return the batch of this process, with episodes that start at age 0."""
        env = self.training_env(num_envs, env_offset)
        if isinstance(env, TensorBatch):
            env.spreads = False
            if not hasattr(env.env.env, "reset"):
                log_once(
                    f"{env.env_id} has no reset: the first episodes of a test go on with those of "
                    "the training, so they are too short"
                )
        return env


def make_batch(settings: TaskSettings, num_envs: int, env_offset: int) -> TorchEnv:
    """Make the batch that --env names, and find out how to reset it.

    Raises:
        ValueError: the batch cannot be made or used.
    """
    config = settings.task
    maker = own_maker(config.env)
    train = settings.sections.get("train")
    entropy = np.random.SeedSequence([train.seed if train else 0, env_offset])
    seed = int(entropy.generate_state(1)[0]) >> 1  # 31 bits
    offered = {"device": settings.device, "seed": seed}
    accepted = argument_names(maker)
    arguments = {name: value for name, value in offered.items() if name in accepted}
    settings.heartbeat()
    with making(config.env):
        seed_generators(seed)  # the function may draw from them
        env: Any = maker(num_envs=num_envs, **arguments | config.kwargs())  # type: ignore[misc]
        mode = autoreset_mode(env)
        starts_by_mask = mode not in (None, AutoresetMode.SAME_STEP)
        form = list if getattr(env, "seeds_each", False) else None
        batch = SameStep(env, num_envs, form, starts_by_mask, actor_part)
        obs, _ = batch.reset(seed=list(range(num_envs)))
        first = tree_leaves(obs)[0]
        if not isinstance(first, np.ndarray | Tensor):
            raise TypeError(
                f"observations are {type(first).__module__}.{type(first).__name__}, not tensors or "
                "NumPy arrays: convert them, for example with torch.from_dlpack"
            )
        if len(first) != num_envs:
            raise ValueError(f"observations have {len(first)} rows, not num_envs {num_envs}")

        # seeds and resets
        if isinstance(env, VectorEnv) and isinstance(first, np.ndarray):
            batch.seed_form = form or find_seed_form(env, num_envs)
        if starts_by_mask and not resets_by_mask(env, num_envs, first):
            raise ValueError(
                "it starts episodes a step late (autoreset mode NEXT_STEP), and its reset knows no "
                "reset_mask: make it with SAME_STEP"
            )
        if isinstance(first, np.ndarray) and not mode:
            log_once(
                f"{config.env} has no metadata with an autoreset_mode, so it is read as SAME_STEP: "
                "the next episode must start in the step that ends one"
            )
        if not batch.seed_form:
            log_once(
                f"{config.env}: the environments of a rank share one seed, so results depend on "
                "the number of ranks (docs/own_environment.md, Batches)"
            )

        # spaces
        declared = getattr(batch, "single_observation_space", None)
        is_space = isinstance(declared, spaces.Space)
        batch.single_observation_space = actor_part(declared) if is_space else space_of(obs)
        batch.single_action_space = action_space_of(batch)
        adapter: Any = TorchVectorEnv if isinstance(first, np.ndarray) else TensorBatch
        adapted = adapter(
            env=batch,
            env_id=config.env,
            env_offset=env_offset,
            device=settings.device,
            heartbeat=settings.heartbeat,
            env_timeout=config.env_timeout,
            end=settings.end,
        )
        # get_state of ManiSkill, for example, returns only what the simulator knows, as a tensor
        adapted.can_snapshot &= isinstance(getattr(batch, "get_state", dict)(), dict)
        return adapted
