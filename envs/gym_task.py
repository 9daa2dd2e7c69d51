"""The task of any Gymnasium environment: train on it, score by the return of episodes."""

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

BUDGET = 10  # by default, validation takes at most one in this many environment steps of training
FEWEST_EPISODES = 5  # by default, the smallest number of episodes in a validation
# A longer episode is cut off. In tasks whose episodes are short or never end, so is an episode that
# is much longer than those in training: see `episode_limit`.
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
        """Return the return from which the registration calls the task solved, if any."""
        return find_spec(self.settings.task.env).reward_threshold

    # ---- environments

    def training_env(self, num_envs: int, env_offset: int = 0) -> TorchEnv:
        """Make environments whose global numbers start at `env_offset`."""
        settings = self.settings
        config = settings.task
        names = ("vectorization", "info_mask", "previous_action", "previous_reward")
        options: dict = {name: getattr(config, name) for name in names}
        options["env_kwargs"] = config.kwargs()
        others: dict = {
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
            return WorkerEnv(num_envs, workers, groups, options, **others)
        return make_vector_env(num_envs=num_envs, end=settings.end, **options, **others)

    def probe_env(self) -> TorchEnv:
        """Make one environment in this process, to read its spaces."""
        return self.changed(env_workers=0).training_env(1)

    def changed(self, **changes: Any) -> "GymTask":
        """Return a copy with other values of TaskConfig."""
        config = replace(self.settings.task, **changes)
        return GymTask(replace(self.settings, task=config))

    def try_evaluation_env(self, env_offset: int) -> None:
        """Make one evaluation environment beside the training's, to fail before any work.

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

    # ---- validation and test

    def validation(self, agent: TrainedAgent, options: EvaluationOptions) -> Validation | None:
        """Return validation episodes; None if the budget allows too few.

        With `options.within_budget`, all validations of a run together take at most a tenth as many
        environment steps as its training, so they have fewer episodes.
        """
        counts = options.counts
        num_episodes = self.settings.task.eval_episodes
        max_steps = episode_limit(counts)
        used = counts.validated
        if options.within_budget:
            budget = counts.global_step // BUDGET - used["steps"]
            affordable = budget // self._expected_length(counts)
            if affordable < min(FEWEST_EPISODES, num_episodes):
                return None
            num_episodes = min(affordable, num_episodes)
            max_steps = min(budget // num_episodes, max_steps)

        def figures(records: Records) -> dict[str, float]:
            record = records["policy"]
            # All environments are stepped until the longest episode has ended; the length of a
            # repeated episode does not include the steps before its repetition.
            length = max_steps if record["repeats"].any() else int(record["length"].max())
            used["steps"] += num_episodes * length
            used["longest"] = max(length, used["longest"])
            return episode_figures(record) | {"total_steps": used["steps"]}

        return Validation(
            agents={"policy": agent},
            count=num_episodes,
            run=partial(run_episodes, self, options.seeds, max_steps),
            figures=figures,
        )

    def _expected_length(self, counts: Counts) -> int:
        """Return a length that the next validation episodes will hardly exceed."""
        mean = counts.global_step // counts.episodes if counts.episodes else 100
        longest = counts.validated["longest"]
        length = 2 * max(longest, mean) if longest else 10 * mean
        config = self.settings.task
        limit: Any = find_spec(config.env).max_episode_steps
        limit = config.kwargs().get("max_episode_steps", limit)
        # -1 is Gymnasium's value for no limit
        return length if limit in (None, -1) else min(limit, max(length, 1000))

    def tests(self, agents: TrainedAgents, options: EvaluationOptions) -> dict[str, Trial]:
        """Return the test episodes and, if asked for, an episode to film before them."""
        trials: dict[str, Trial] = {}
        if options.video:  # comes first, because it fails if the environment cannot draw
            trials["video"] = self._video(agents["policy"], options.seeds, options.video)
        limit = episode_limit(options.counts)
        if options.after_training and options.writes:
            print(self._cost(len(agents), limit, options), flush=True)
        run = partial(run_episodes, self, options.seeds, limit)
        trials["episodes"] = Trial(agents=agents, count=self.settings.task.eval_episodes, run=run)
        return trials

    def _video(self, agent: TrainedAgent, seeds: Seeds, folder: Path) -> Trial:
        """Return a trial that saves pictures of the first episode in a folder."""
        from envs.pictures import Filmed  # late: matplotlib takes 0.5 s

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
        if options.within_budget and not counts.validated["steps"]:
            text += (
                "\nno validation, no best.pt: a tenth of the training's steps allows too few "
                "episodes; --validate_every N validates whatever it costs"
            )
        return text

    def report(self, results: Results, options: EvaluationOptions) -> Report:
        """Return the figures of each policy on the same episodes, also as text."""
        names = {"policy": "test"} if options.after_training else {}
        figures = {
            names.get(name, name): episode_figures(record)
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
    """Run the evaluation episodes with these numbers.

    Each episode has its own environment and depends only on the seeds and its number. If an
    environment is restarted after a fault, its episode is repeated. Episodes that still run after
    `max_steps` steps are cut off.

    Returns:
        For each episode, its return, its length, the number of its repetitions, and 1 if it was cut
        off, else 0.
    """
    env = task.training_env(len(numbers), numbers.start)
    obs, _ = env.reset(seed=seeds(numbers.start, len(numbers)))
    shape = 3, len(numbers)
    total, length, repeats = torch.zeros(shape, dtype=torch.float64, device=obs.device)
    alive = start = length == 0  # [B], all True
    restarts = repeats  # restarts of each environment
    for _ in range(max_steps):
        if not alive.any():
            break
        obs, rewards, terminated, truncated, info = env.step(agent(env, obs, start))
        task.settings.heartbeat()
        before, restarts = restarts, torch.tensor(env.restarts, device=obs.device)
        repeated = alive & (restarts > before)
        repeats = repeats + repeated
        total = (total + info.get("raw_rewards", rewards) * alive) * ~repeated
        length = (length + alive) * ~repeated
        start = terminated | truncated
        alive = alive & (~start | repeated)
    env.close()
    columns = {"return": total, "length": length, "repeats": repeats, "cut": alive.double()}
    return {name: column.tolist() for name, column in columns.items()}


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
