"""The task of any Gymnasium environment; a policy is scored by its mean return."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from envs import find_spec, make_vector_env
from envs.task import (
    Agent,
    Counts,
    EvaluationOptions,
    Record,
    Records,
    Report,
    Results,
    Seeds,
    Task,
    TaskSettings,
    TrainedAgent,
    TrainedAgents,
    Trial,
    Validation,
)
from envs.vector.guards import EnvironmentFaultError
from envs.vector.layout import TorchEnv
from rl_dist.errors import UserError, printable

BUDGET = 10  # by default, all validations together take at most 1/10 of the training's steps
FEWEST_EPISODES = 5  # by default, the smallest number of episodes in a validation
# Evaluation cuts off every episode after this many steps. If training episodes are short or never
# end, `episode_limit` returns a smaller number.
MAX_EPISODE_STEPS = 100_000
FIGURES = (
    "return", "return_std", "return_min", "length", "episodes_cut", "episodes", "env_restarts",
)  # fmt: skip


@dataclass(frozen=True)
class GymTask(Task):
    """Trains on the Gymnasium environment that --env names."""

    settings: TaskSettings

    scored_by = "return"
    metrics = (*FIGURES, "total_steps")
    tests_best = True
    advice = "see docs/own_environment.md#exploration"

    def __post_init__(self) -> None:
        find_spec(self.settings.task.env)  # raises if the environment is unknown

    def describe(self) -> str:
        """Return one line with the environment's id and arguments."""
        config = self.settings.task
        return printable(f"environment: {config.env} {config.env_kwargs}".rstrip())

    @property
    def solved_at(self) -> float | None:  # type: ignore[override]
        """Mean return at which the task is solved, according to its registration, if any."""
        return find_spec(self.settings.task.env).reward_threshold

    # ---- environments

    def training_env(self, num_envs: int, env_offset: int = 0) -> TorchEnv:
        """Make environments whose global numbers start at `env_offset`."""
        settings = self.settings
        config = settings.task
        names = ("vectorization", "info_mask", "previous_action", "previous_reward")
        options: dict = {name: getattr(config, name) for name in names}
        options["env_kwargs"] = config.kwargs()
        common: dict = {  # arguments of both WorkerEnv and make_vector_env
            "env_id": config.env,
            "env_offset": env_offset,
            "device": settings.device,
            "heartbeat": settings.heartbeat,
            "env_timeout": config.env_timeout,
            "env_restarts": config.env_restarts,
        }
        if config.env_workers > 0:
            from envs.workers.env import WorkerEnv

            workers, groups = config.env_workers, config.env_groups
            return WorkerEnv(num_envs, workers, groups, options, **common)
        return make_vector_env(num_envs=num_envs, end=settings.end, **options, **common)

    def probe_env(self) -> TorchEnv:
        """Make one environment in this process, to read its spaces."""
        return self.changed(env_workers=0).training_env(1)

    def changed(self, **changes: Any) -> "GymTask":
        """Return a copy of this task in which some fields of TaskConfig have other values."""
        config = replace(self.settings.task, **changes)
        return GymTask(replace(self.settings, task=config))

    def try_evaluation_env(self, env_offset: int) -> None:
        """Make one evaluation environment while the training environments exist, then close it.

        If this is impossible, the run fails before it trains, not at its first validation.

        Raises:
            UserError: the environment cannot be made.
        """
        try:
            self.training_env(1, env_offset).close()
        except (ValueError, EnvironmentFaultError) as error:
            raise UserError(
                f"beside the training environments, none can be made for evaluation: {error}; "
                "--validate_every 0 --eval_episodes 1 leaves out validation and tests in one "
                "environment after the training, --eval_episodes 0 leaves out all evaluation"
            ) from error

    def evaluation_env(self, num_envs: int, env_offset: int) -> TorchEnv:
        """Make environments for evaluation episodes; there may be more than `num_envs`."""
        return self.training_env(num_envs, env_offset)

    # ---- validation and test

    def validation(self, agent: TrainedAgent, options: EvaluationOptions) -> Validation | None:
        """Return the trial of a validation; None if the budget allows too few episodes.

        With `options.within_budget`, all validations of a run together take at most a tenth of the
        environment steps of its training. This limits the number and length of their episodes.
        """
        counts = options.counts
        num_episodes = self.settings.task.eval_episodes
        max_steps = episode_limit(counts)
        validated = counts.validated
        if options.within_budget:
            budget = counts.global_step // BUDGET - validated["steps"]
            affordable = budget // self._expected_length(counts)
            if affordable < min(FEWEST_EPISODES, num_episodes):
                return None
            num_episodes = min(affordable, num_episodes)
            max_steps = min(budget // num_episodes, max_steps)

        def figures(records: Records) -> dict[str, float]:
            record = records["policy"]
            # All environments are stepped until the longest episode has ended. The length of a
            # repeated episode omits the steps before the repetition, so assume the maximum then.
            length = max_steps if record["repeats"].any() else int(record["length"].max())
            validated["steps"] += num_episodes * length
            validated["longest"] = max(length, validated["longest"])
            return episode_figures(record) | {"total_steps": validated["steps"]}

        return Validation(
            agents={"policy": agent},
            count=num_episodes,
            run=partial(run_episodes, self, options.seeds, max_steps),
            figures=figures,
        )

    def _expected_length(self, counts: Counts) -> int:
        """Return a number of steps that the next validation episodes are unlikely to exceed."""
        mean = counts.global_step // counts.episodes if counts.episodes else 100
        longest = counts.validated["longest"]
        length = 2 * max(longest, mean) if longest else 10 * mean
        config = self.settings.task
        limit: Any = find_spec(config.env).max_episode_steps
        limit = config.kwargs().get("max_episode_steps", limit)
        # -1 is Gymnasium's value for no limit
        return length if limit in (None, -1) else min(limit, max(length, 1000))

    def tests(self, agents: TrainedAgents, options: EvaluationOptions) -> dict[str, Trial]:
        """Return the trial of the test episodes; with `options.video`, first film one episode."""
        trials: dict[str, Trial] = {}
        if options.video:  # first, because it fails if the environment cannot render
            trials["video"] = self._video(agents["policy"], options.seeds, options.video)
        limit = episode_limit(options.counts)
        if options.after_training and options.writes:
            print(self._cost(len(agents), limit, options), flush=True)
        run = partial(run_episodes, self, options.seeds, limit)
        trials["episodes"] = Trial(agents=agents, count=self.settings.task.eval_episodes, run=run)
        return trials

    def _video(self, agent: TrainedAgent, seeds: Seeds, folder: Path) -> Trial:
        """Return a trial that saves a GIF of the first episode in a folder."""
        from envs.pictures import Filmed  # imported late: importing matplotlib takes 0.5 s

        task = self.changed(
            env_kwargs=json.dumps(self.settings.task.kwargs() | {"render_mode": "rgb_array"}),
            vectorization="sync",
            env_workers=0,
            env_restarts=0,
        )

        def run(agent: Agent, numbers: range) -> dict[str, list[float]]:
            filmed = Filmed(agent)
            results = run_episodes(task, seeds, MAX_EPISODE_STEPS, filmed, numbers)
            filmed.save(folder)
            return results

        return Trial(agents={"policy": agent}, count=1, run=run)

    def _cost(self, num_agents: int, limit: int, options: EvaluationOptions) -> str:
        """Return lines that say how long the final test may take, and why there is no best.pt."""
        counts = options.counts
        episodes = num_agents * self.settings.task.eval_episodes
        length = counts.global_step // counts.episodes if counts.episodes else limit
        text = (
            f"final test: {episodes} episodes, about {episodes * length:,} environment steps "
            f"(training took {counts.global_step:,}); an episode is cut off after {limit:,} steps; "
            "--eval_episodes 0 leaves out the test"
        )
        if self.metrics and options.within_budget and not counts.validated["steps"]:
            text += (
                "\nno validation, no best.pt: a tenth of the training's steps allows too few "
                "episodes; --validate_every N validates whatever it costs"
            )
        return text

    def report(self, results: Results, options: EvaluationOptions) -> Report:
        """Return statistics of each policy's test episodes, as a dict and as text."""
        labels = {"policy": "test"} if options.after_training else {}
        figures = {
            labels.get(name, name): episode_figures(record)
            for name, record in results["episodes"].items()
        }
        line = (
            "{}: {episodes:.0f} episodes without noise: mean return {return:.2f} (sd "
            "{return_std:.2f}, min {return_min:.2f}), mean length {length:.1f}, {episodes_cut:.0f} "
            "cut, {env_restarts:.0f} environment restarts"
        )
        return figures, "\n".join(line.format(name, **values) for name, values in figures.items())


def run_episodes(
    task: GymTask, seeds: Seeds, max_steps: int, agent: Agent, numbers: range
) -> dict[str, list[float]]:
    """Run the evaluation episodes with the given numbers.

    Each episode has its own environment and depends only on the seeds and its number. If an
    environment is restarted after a fault, its episode is repeated from the start. An episode that
    has not ended after `max_steps` steps is cut off.

    Returns:
        For each episode, its return, its length, the number of its repetitions, and 1 if it was cut
        off, else 0.
    """
    env = task.evaluation_env(len(numbers), numbers.start)
    obs, _ = env.reset(seed=seeds(numbers.start, env.num_envs))
    shape = 3, env.num_envs
    total, length, repeats = torch.zeros(shape, dtype=torch.float64, device=obs.device)
    start = length == 0  # [B], all True
    alive = start.cumsum(0) <= len(numbers)  # [B], an episode counts and has not ended
    restarts = repeats  # number of restarts of each environment, [B]
    for _ in range(max_steps):
        if not alive.any():
            break
        obs, rewards, terminated, truncated, info = env.step(agent(env, obs, start))
        task.settings.heartbeat()
        restarts_before = restarts
        restarts = torch.tensor(env.restarts, device=obs.device)
        repeated = alive & (restarts > restarts_before)
        repeats = repeats + repeated
        # A repeated episode starts again with return 0 and length 0.
        total = (total + info.get("raw_rewards", rewards) * alive) * ~repeated
        length = (length + alive) * ~repeated
        start = terminated | truncated
        alive = alive & (~start | repeated)
    env.check()
    task.release(env)
    columns = {"return": total, "length": length, "repeats": repeats, "cut": alive.double()}
    return {name: column.tolist()[: len(numbers)] for name, column in columns.items()}


def episode_figures(record: Record) -> dict[str, float]:
    """Compute statistics of the results of `run_episodes`."""
    returns = record["return"]
    figures = (
        returns.mean(),
        returns.std(),
        returns.min(),
        record["length"].mean(),
        record["cut"].sum(),
        len(returns),
        record["repeats"].sum(),
    )
    return {name: float(value) for name, value in zip(FIGURES, figures, strict=True)}


def episode_limit(counts: Counts) -> int:
    """Return the number of steps after which an evaluation cuts off an episode.

    This is 10 times the mean length of training episodes, but at least 1,000. Without this limit,
    an evaluation might take much longer than the training if a policy has learned to keep an
    episode going, or if episodes never end.
    """
    longest = 10 * counts.global_step // counts.episodes if counts.episodes else 0
    return min(max(longest, 1000), MAX_EPISODE_STEPS)
