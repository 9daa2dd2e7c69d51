"""The Python interface: train policies, watch training, and use trained policies.

`train` does what train_distributed.py does; `train_seeds` trains once with each of several seeds. A
policy loaded with `load_policy` chooses actions for observations and needs no environment.
"""

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector.utils import batch_space, iterate

from agents.learner.callbacks import Callback
from agents.learner.controller import PolicyController
from agents.learner.network.noise import action_noise
from agents.learner.network.seeds import PREDICTION_STREAM, stream_seed
from agents.rank import run_rank
from agents.run.choice import RUNS, parse_training
from agents.run.saved import LoadedAgent, Which, load_agent
from agents.run.start import start
from envs.intervals import Interval, mean_interval
from envs.vector.spaces import MASK_KEY, check_masks
from rl_dist.errors import (
    QUIET,
    SilentStream,
    UserError,
    escape_what_the_locale_lacks,
    message_and_code,
    one_line,
    print_error_once,
    streams,
)
from rl_dist.files import absolute, write_whole
from rl_dist.flags import ParsedFlags
from rl_dist.launch.child import as_flags
from rl_dist.process_group.process_ends import SCRIPT_RAN_AGAIN
from rl_dist.run_dir import RunDir
from rl_dist.telemetry.metrics import close_logging

# The state of a policy consists of the recurrent state [B, S, H], the earlier observations of the
# window [B, n-1, F], and the previous action, encoded as a policy input [B, D]. Without
# --previous_action, D is 0.
State = tuple[np.ndarray, ...]


class LoadedPolicy:
    """A trained policy; `predict` takes the policy's state and returns the next one.

    Observations and actions belong to the spaces of the environment in which the policy was
    trained: `observation_space` and `action_space`.
    """

    def __init__(self, agent: LoadedAgent, seed: int = 0) -> None:
        self.agent = agent
        self.observation_space, self.action_space = agent.spaces
        self._encode = agent.encoder()
        self._decode = self._encode.actions
        # Inputs of the policy that are not in the observation, such as the previous action
        extras = agent.policy.layout.parts[len(self._encode.parts) :]
        self._extras = {part.name: part.size for part in extras}
        self._noise_seed = stream_seed(seed, PREDICTION_STREAM)
        self._num_drawn = 0  # number of calls that used noise; selects the noise of the next call

    def predict(
        self,
        observation: object,
        state: State | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = True,
        action_masks: object = None,
        reward: np.ndarray | float = 0.0,
    ) -> tuple[Any, State]:
        """Return the action for one observation or a batch, and the next state.

        The signature follows sb3-contrib, so that sb3's `evaluate_policy` accepts this object.

        Args:
            observation: one element of `observation_space`, or a batch of such elements.
            state: the state that the previous call returned; None at the start.
            episode_start: [B] bool; True if an episode begins, which resets the state.
            deterministic: True takes the most likely action, False samples an action. Samples use
                white noise, regardless of --noise_color, and never repeat the noise of training.
            action_masks: for a policy trained with --info_mask: the mask from the environment's
                info (an array, or a tuple of arrays), or a list of masks for a batch. None allows
                all actions.
            reward: [B] reward of the previous step, for a policy trained with --previous_reward.

        Raises:
            ValueError: an argument has a wrong shape or value, such as a NaN in the observation.
        """
        policy = self.agent.policy
        # Encode the observation as rows. The shape of any part shows whether the observation is a
        # batch. An action mask may be nested, so use a mask only if there is no other part.
        leaf = min(self._encode.leaves, key=lambda leaf: leaf.part.kind == "mask")
        try:
            shape = np.shape(leaf.pick(observation))
            is_single = shape == leaf.space.shape
            count = 1 if is_single else shape[0]
            rows = self._encode([observation] if is_single else observation, count)  # [B, F]
        except (LookupError, TypeError) as error:
            raise ValueError(
                f"the observation does not fit its space: {one_line(error)}"
            ) from error
        masks = [action_masks] if is_single and action_masks is not None else action_masks

        # append the inputs that are not in the observation
        starts = np.full(count, episode_start, bool)
        state = self._checked(state, count)
        extras = {
            "previous_action": state[2] * ~starts[:, None],
            "previous_reward": (np.full(count, reward) * ~starts)[:, None],
            MASK_KEY: self._masks(masks, count),
        }
        inputs = np.concatenate([rows, *(extras[name] for name in self._extras)], axis=1)

        # choose the actions
        like = policy.critic_head.weight  # tensor with the policy's device and type
        memory, history = (torch.as_tensor(part).to(like) for part in state[:2])
        controller = PolicyController(policy, self.agent.normalizer, state=memory, history=history)
        scaled_noise = None
        if not deterministic:
            noise = action_noise(self._decode.space, self._noise_seed, 0, count, self._num_drawn, 1)
            scaled_noise = policy.scale_noise(noise[0].to(like))  # [B, A]
            self._num_drawn += 1
        begins = torch.from_numpy(starts).to(like.device)
        row_type = self._encode.row_type(policy.layout)
        obs = torch.from_numpy(inputs.astype(row_type)).to(like.device)
        chosen = controller(policy, obs, begins, scaled_noise).cpu().numpy()
        previous_action = self._decode.encode(chosen)[:, : state[2].shape[1]]
        actions = self._decode(chosen)
        if is_single:
            actions = next(iterate(batch_space(self.action_space, 1), actions))
        parts: Any = controller.state, controller.history
        return actions, (*(part.cpu().numpy() for part in parts), previous_action)

    def _checked(self, state: State | None, count: int) -> State:
        """Check the state's shapes for `count` observations; replace None by zeros."""
        policy = self.agent.policy
        no_action = torch.zeros(count, self._extras.get("previous_action", 0))
        parts = policy.initial_state(count), policy.empty_history(count), no_action
        zeros = tuple(part.cpu().numpy() for part in parts)
        if state is None:
            return zeros
        expected, given = ([np.shape(part) for part in parts] for parts in (zeros, state))
        if given != expected:
            raise UserError(
                f"the state of {count} observations must have the shapes {expected}, got {given}: "
                "pass the state that the last predict returned, or None"
            )
        return state

    def _masks(self, masks: object, count: int) -> np.ndarray:
        """Return action masks as rows [B, choices]; None allows all choices."""
        size = self._extras.get(MASK_KEY, 0)
        if masks is None:
            return np.ones((count, size))
        rows = self._decode.flat_masks(masks, count).reshape(count, size)
        check_masks(rows, self._decode.sizes)
        return rows


def load_policy(
    path: str | Path,
    which: Which = "",
    device: str | torch.device = "cpu",
    seed: int = 0,
    core: str | None = None,
    encoder: str | None = None,
) -> LoadedPolicy:
    """Load a trained policy from a run directory or checkpoint file.

    Args:
        which: checkpoint to load from a run directory: best, last or "" (see `load_agent`).
        device: device that computes the actions.
        seed: seed of the noise that `predict` uses with deterministic=False.
        core, encoder: module:Class, as given to --core or --encoder in training. They are needed
            if another user owns the run directory, or if the checkpoint was copied without its run
            directory.

    Raises:
        UserError: the checkpoint is missing or damaged, or `core` or `encoder` is needed.
    """
    return LoadedPolicy(load_agent(path, device, which, core, encoder), seed)


# ---- train

# `train` holds this lock: logging and signal handlers exist only once in a process.
_training = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run whose training has finished or was stopped."""

    run_dir: Path
    exit_code: int  # 0; or 128 + the number of the signal, such as SIGTERM, that stopped the run

    @property
    def _directory(self) -> RunDir:
        return RunDir(self.run_dir)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of every iteration, as in metrics.jsonl."""
        return self._directory.records()

    @property
    def test(self) -> dict[str, Any]:
        """Return the results of the final evaluation; empty if the run was stopped.

        For real prices, the results are also empty, because training does not evaluate on the test
        span. summary.json has the results on the spans "train" and "valid".
        """
        return self._directory.summary().get("test", {})

    @property
    def policy(self) -> LoadedPolicy:
        """Load the policy from the run directory with `load_policy`."""
        return load_policy(self.run_dir)


def train(
    env: str | None = None,
    *,
    num_ranks: int | None = None,
    on_iteration: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
    quiet: bool = False,
    **settings: object,
) -> TrainedRun:
    """Train as train_distributed.py does when given the same flags.

        >>> from agents import train
        >>> run = train(env="CartPole-v1", total_steps=20_000)
        >>> run.test["return"], run.metrics[-1]["loss/entropy"]
        >>> action, state = run.policy.predict(observation)

    A single rank trains in this process. Several ranks run in new processes, which import the main
    module again: call `train` under `if __name__ == "__main__":`, and define callbacks in a module.

    Args:
        env: Gymnasium id, or module:id.
        num_ranks: number of training processes, as for the flag --num_gpus.
        on_iteration, on_evaluation, on_checkpoint: callbacks, which every rank calls with a
            `Moment`. If a callback returns False, all ranks stop after this iteration.
        quiet: print nothing, except what callbacks print.
        settings: values of flags, by flag name. True and False become true and false, None is
            skipped, and a mapping becomes JSON.

    Raises:
        UserError: the settings are wrong, training failed, or another call of `train` is running
            in this process. The reason is also printed.
        KeyboardInterrupt: Ctrl-C stopped the training, which is saved; the message names the run
            directory.
    """
    # A new rank reaches this line if it imports a script without a `__main__` guard.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(SCRIPT_RAN_AGAIN)
    callbacks = {
        "iteration": on_iteration,
        "evaluation": on_evaluation,
        "checkpoint": on_checkpoint,
    }
    if not _training.acquire(blocking=False):
        raise UserError(
            "train() is already running in this process: wait until it returns, or train in "
            "another process"
        )
    with ExitStack() as cleanup:
        cleanup.callback(_training.release)
        cleanup.callback(close_logging)
        handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
        if quiet:
            os.environ[QUIET] = "1"
            cleanup.callback(os.environ.pop, QUIET)
            cleanup.enter_context(streams(SilentStream))
        escape_what_the_locale_lacks()
        try:
            parsed = parse_training(as_flags({"env": env, "num_gpus": num_ranks} | settings))
            outcome = start(parsed, run_rank, callbacks)
        except (ValueError, OSError) as error:
            message, code = message_and_code(error)
            print_error_once(f"error: {message}")
            raise UserError(message, exit_code=code) from error
        except SystemExit as error:  # the parser has already printed the reason
            raise error.__cause__ or UserError("the settings are invalid") from None
        finally:
            for signum, handler in handlers.items():  # restore handlers that training replaced
                if signal.getsignal(signum) != handler:
                    signal.signal(signum, handler)
    code = outcome.exit_code
    if 0 < code < 128:
        # Under torchrun, the error may have occurred on another rank. That rank prints the error.
        raise UserError(outcome.error or "training failed: see above", exit_code=code)
    run = TrainedRun(run_dir=outcome.run_dir, exit_code=code)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt(
            f"training was stopped and saved: continue with --resume {run.run_dir}"
        )
    return run


# ---- several seeds


@dataclass(frozen=True)
class SeedsResult:
    """The scores of several runs that differ only in their seeds."""

    run_dir: str  # the run with seed N is in the subfolder seed_N
    metric: str  # name of the score
    scores: dict[int, float]  # score in the final evaluation, by seed
    interval: Interval  # mean score, and low and high end of its 95 % interval


def train_seeds(seeds: Sequence[int], run_dir: str | Path = "", **settings: Any) -> SeedsResult:
    """Train once with each seed, one after the other, and report all scores.

        >>> from agents import train_seeds
        >>> print(train_seeds([1, 2, 3], env="CartPole-v1", total_steps=20_000))

    A run that already exists in `run_dir` is resumed or, if it has finished, only evaluated again.
    For an existing run, `settings` may change only what --resume may change.

    Args:
        run_dir: directory for all these runs; "" creates a new directory in runs/.
        settings: values of flags, by flag name; see `agents.train`.

    Raises:
        UserError: a run failed or was stopped; finished runs are kept.
    """
    if len(set(seeds)) < max(len(seeds), 2):
        raise UserError(f"seeds must be two or more different numbers, got {list(seeds)}")
    folder = absolute(run_dir) if run_dir else RunDir.fresh(RUNS).path
    scores: dict[int, float] = {}
    for seed in seeds:
        path = folder / f"seed_{seed}"
        print(f"seed {seed}: {path}", flush=True)
        resume = "auto" if path.exists() else None
        run = train(**settings, seed=seed, run_dir=path, resume=resume)
        if run.exit_code:
            raise UserError(f"the run with seed {seed} was stopped", exit_code=run.exit_code)
        metric, scores[seed] = score_of(run._directory.summary())
    result = SeedsResult(str(folder), metric, scores, mean_interval([*scores.values()]))
    write_whole(folder / "seeds.json", json.dumps(asdict(result), indent=2) + "\n")
    return result


def train_several(parsed: ParsedFlags) -> int:
    """Train once with each seed of --seeds; return the exit code."""
    settings: dict[str, Any] = dict(parsed.given)
    seeds = settings.pop("seeds")
    if "RANK" in os.environ or settings.keys() & {"seed", "resume"}:
        raise UserError("--seeds starts new runs: do not combine with --seed, --resume or torchrun")
    if not seeds.replace(" ", "").isdecimal():
        raise UserError(f"seeds must be whole numbers, got {seeds!r}")
    try:
        result = train_seeds([*map(int, seeds.split())], **settings)
    except KeyboardInterrupt as stopped:
        raise UserError(str(stopped), exit_code=128 + signal.SIGINT) from None
    interval = "  mean {mean:.4g}, 95 % interval [{low:.4g}, {high:.4g}]".format(**result.interval)
    print(f"{result.metric} by seed: {result.scores}\n{interval}")
    return 0


def score_of(summary: Mapping[str, Any]) -> tuple[str, float]:
    """Return the name and the value of the score in the summary of a finished run."""
    span = next(name for name in ("test", "valid", "train") if name in summary)
    if "policies" in summary[span]:
        return f"Sharpe ratio on the {span} span", summary[span]["policies"]["policy"]["sharpe"]
    return "mean return without noise", summary[span]["return"]
