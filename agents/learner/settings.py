"""Settings of the learner, and the attributes of a run that the learner reads."""

from typing import Annotated, Any, Literal, Protocol

from rl_dist.flags import Field, PathText, Text, configuration, or_auto
from rl_dist.launch.config import LaunchConfig
from rl_dist.run_dir import RunDir
from rl_dist.strategies.config import StrategyConfig
from rl_dist.telemetry.loggers import named_loggers

# values that stand for auto
AUTO_SIZE = 0  # batch_size: measure the fastest size when the run starts
AUTO_INTERVAL = -1  # validate_every: keep the cost of validation low


@configuration
class TrainConfig:
    """Length, sizes and checkpoints of a training run."""

    num_episodes: int = Field(5000, ge=1, le=10**12)
    """Stop after this many training episodes, counted over all ranks."""
    total_steps: int = Field(0, ge=0, le=10**15)
    """Stop after this many environment steps, counted over all ranks; 0: use num_episodes."""
    batch_size: Annotated[int, or_auto(AUTO_SIZE)] = Field(128, ge=AUTO_SIZE, le=10**7)
    """Number of sequences per minibatch; 128 sequences with bptt_steps 32 are 4,096 steps; auto or
    0: when the run starts, time sizes that fit into memory, and use the fastest."""
    grad_accumulation: int = Field(1, ge=1, le=10**6)
    """Number of minibatches whose gradients are averaged for each optimizer step. With n
    minibatches, training is the same as with n times the batch_size, but needs less memory."""
    num_envs: int = Field(0, ge=0, le=10**7)
    """Number of environments that run in parallel; 0: enough for two optimizer steps per epoch,
    which is 2 * batch_size * grad_accumulation * bptt_steps / num_steps or slightly more."""
    num_steps: int = Field(128, ge=1, le=10**6)
    """Steps that each environment takes per rollout; must be a multiple of bptt_steps."""
    bptt_steps: int = Field(32, ge=1, le=10**6)
    """Length of a training sequence: gradients flow back through this many steps."""
    scaling: Literal["strong", "weak"] = "strong"
    """strong: num_envs and batch_size are totals that are divided among the ranks, so that the
    learning curve does not depend on the number of ranks; weak: they are sizes per rank."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """With --scaling weak, multiply learning_rate by the number of ranks (linear) or by the square
    root of that number (sqrt)."""
    pretrained: PathText = ""
    """Start from the feature LSTM that python -m agents.pretrain wrote to this directory."""
    init_from: PathText = ""
    """Start from the weights and normalisers of an earlier run or checkpoint. The inputs and
    outputs of the policy must have the same shapes in both runs. The optimizer, the counters and
    the environments start from the beginning."""
    seed: int = Field(1, ge=0, le=2**63 - 1)
    """Seed for the policy, the environments, the action noise and the shuffling of sequences."""
    normalize_obs: bool = True
    """Normalise observations by their running mean and standard deviation over all ranks; with
    --encoder, the default is off, because symbols such as the cells of a grid must not change."""
    normalize_rewards: bool = True
    """Divide rewards by the running standard deviation of discounted returns."""
    validate_every: Annotated[int, or_auto(AUTO_INTERVAL)] = Field(
        AUTO_INTERVAL, ge=AUTO_INTERVAL, le=10**9
    )
    """Number of iterations between evaluations on the validation data; 0: never evaluate; auto: 20.
    In tasks other than trading, auto also limits all evaluations together to a tenth as many
    environment steps as training: if necessary, it evaluates fewer episodes, or less often."""
    checkpoint_every: int = Field(20, ge=1, le=10**9)
    """Number of iterations between checkpoints. A checkpoint is also saved after the first
    iteration, at the end of training and after a stop signal."""
    stop_at: Text = Field("", json_schema_extra={"nargs": "+"})
    """Metric and value, such as valid/return 475. Training stops after the first iteration in which
    the metric reaches the value; valid/ metrics exist only every validate_every iterations, and
    episode/return and episode/length count as means of the last 100 training episodes."""
    callback: Text = ""
    """Function to call on every rank after each iteration, evaluation and checkpoint, given as
    module:function. If it returns False, training stops."""
    keep_checkpoints: int = Field(3, ge=1, le=10**6)
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_best: Text = "auto"
    """Keep the checkpoint with the highest value of this metric, such as episode/return, as
    checkpoints/best.pt; auto: use valid/sharpe or valid/return, whichever the run reports; off:
    do not write best.pt. As in stop_at, episode/return is a mean of the last 100 episodes, so a run
    in which fewer end has no best.pt, and its newest checkpoint is used. While the metric rises,
    every iteration that reports it saves a checkpoint."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What to do if a checkpoint cannot be written, for example because the disk is full: end the
    run, or continue without this checkpoint."""
    sync_check_every: int = Field(5, ge=0, le=10**9)
    """Number of iterations between checks that all ranks have equal parameters. Every checkpoint is
    also preceded by this check; 0: check only before checkpoints."""
    collective_timeout: float = Field(600.0, ge=1, le=80_000)
    """End the run if a rank makes no progress for this many seconds. The limit applies to waiting
    for another rank, to each call of an environment, callback, core or logger, and to writing a
    checkpoint. The error names the rank that makes no progress and its last activity."""
    startup_timeout: float = Field(600.0, ge=1, le=80_000)
    """Timeout in seconds while the ranks connect to each other and build their environments; from
    the first rollout on, collective_timeout applies."""
    loggers: Text = ""
    """Loggers to use in addition to TensorBoard, separated by commas: wandb, mlflow (install them
    with pip install 'clstm-ppo[wandb]'). Their environment variables, such as WANDB_MODE and
    MLFLOW_TRACKING_URI, are respected."""
    monitor_every: float = Field(1.0, ge=0, le=86_400)
    """Seconds between measurements of each rank's GPU, CPU and memory use; 0: off."""
    profile: bool = False
    """Measure how long each part of an iteration takes; the report is in RUN_DIR/profile."""

    chosen_preset: Text = ""  # not a flag: the run records its preset here

    def __post_init__(self) -> None:
        named_loggers(self.loggers)
        if self.pretrained and (self.init_from or not self.normalize_obs):
            raise ValueError(
                "pretrained needs normalize_obs and excludes init_from: change one of the three"
            )
        try:
            _ = self.stop
        except ValueError:
            raise ValueError(
                f"stop_at must be a metric and a value, such as valid/return 475, got "
                f"{self.stop_at!r}"
            ) from None
        if self.num_steps % self.bptt_steps:
            raise ValueError(
                f"num_steps {self.num_steps} is not a multiple of bptt_steps {self.bptt_steps}: "
                "change one of them"
            )

    @property
    def stop(self) -> tuple[str, float]:
        """Return the metric and the value of stop_at, or ("", 0) if stop_at is empty."""
        name, _, value = (self.stop_at or " 0").partition(" ")
        return name, float(value)

    @property
    def validation_interval(self) -> int:
        """Return the number of iterations between validations; 0: never validate.

        With auto, the task may skip some of these validations.
        """
        return 20 if self.validate_every == AUTO_INTERVAL else self.validate_every

    @property
    def budget(self) -> tuple[int, Literal["steps", "episodes"]]:
        """Return the length of the run and its unit, steps or episodes."""
        return (self.total_steps, "steps") if self.total_steps else (self.num_episodes, "episodes")

    @property
    def sequences_per_step(self) -> int:
        """Return the number of sequences per optimizer step; with weak scaling, per rank."""
        return self.batch_size * self.grad_accumulation

    @property
    def named_metrics(self) -> dict[str, str]:
        """Return the names of the metrics given to stop_at and keep_best, by flag."""
        named = {"stop_at": self.stop[0], "keep_best": self.keep_best}
        return {flag: name for flag, name in named.items() if name not in ("", "auto", "off")}

    def best_metrics(self, scored_by: str) -> tuple[str, ...]:
        """Return a tuple of the metric that chooses best.pt; () if best.pt is not written.

        With --keep_best auto, `scored_by` is this metric.
        """
        return {"auto": (scored_by,), "off": ()}.get(self.keep_best, (self.keep_best,))


@configuration
class PPOConfig:
    """Hyperparameters of PPO, named as in CleanRL."""

    learning_rate: float = Field(3e-4, ge=0, le=10)
    """Step size of Adam."""
    anneal_lr: bool = True
    """Lower the learning rate linearly to zero over num_episodes or total_steps."""
    warmup: int = Field(0, ge=0, le=10**9)
    """Raise the learning rate linearly from zero over this many iterations at the start; 0: off."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount factor of the rewards, per step."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Parameter lambda of generalised advantage estimation."""
    update_epochs: int = Field(4, ge=1, le=1000)
    """Number of training passes over each rollout."""
    refresh_states: bool = False
    """Before every epoch except the first, recompute the initial states of sequences with the
    current policy; off: use the states that the rollout recorded."""
    clip_coef: float = Field(0.2, ge=1e-6, le=10)
    """Clip the probability ratio to the interval from 1 - clip_coef to 1 + clip_coef."""
    clip_vloss: bool = False
    """Also clip the value loss, with the same clip_coef."""
    norm_adv: bool = True
    """Normalise advantages over the whole rollout of all ranks."""
    min_adv_std: float = Field(0.0, ge=0, le=100)
    """Lower bound for the divisor that norm_adv uses, as a multiple of the returns' standard
    deviation. It prevents norm_adv from amplifying the noise of a solved task; 0: off."""
    ent_coef: float = Field(0.0, ge=0, le=10)
    """Weight of the entropy bonus in the loss."""
    vf_coef: float = Field(0.5, ge=0, le=100)
    """Weight of the value loss."""
    max_grad_norm: float = Field(0.5, ge=1e-6, le=1e6)
    """Largest allowed norm of the gradient. If the gradient, averaged over all ranks, has a larger
    norm, it is scaled down to this norm."""
    target_kl: float = Field(0.0, ge=0, le=100)
    """Skip the remaining epochs of an update once the estimated KL divergence exceeds this value;
    0: off."""
    desired_kl: float = Field(0.0, ge=0, le=100)
    """After every epoch, divide the learning rate by 1.5 if the estimated KL divergence is above
    twice this value, or multiply it by 1.5 if it is below half of it; 0: off. The rate stays
    between 1e-5 and 1e-2; warmup and anneal_lr then scale it, so switch anneal_lr off."""
    max_bad_steps: int = Field(10, ge=0, le=10**9)
    """Largest number of optimizer steps in a row that may be skipped because the loss or the
    gradient is NaN or inf. After more skipped steps, the run stops at the end of the update."""


@configuration
class PolicyConfig:
    """Architecture of the policy network, and its action noise."""

    policy: Literal["clstm", "lstm", "gru", "mingru", "mlp", "own"] = "clstm"
    """clstm: a cascade of LSTMs; lstm, gru, mingru: one recurrent core; mlp: a cascade of tanh
    layers without memory; own: the core given by --core."""
    core: Text = ""
    """Class of your own recurrent core, as module:Class; used with --policy own."""
    encoder: Text = ""
    """Class of your own encoder, as module:Class; it turns an observation into the inputs of the
    policy's first core. With it, the default of normalize_obs is off."""
    hidden_size: int = Field(128, ge=1, le=8192)
    """Width of every core and every layer."""
    num_layers: int = Field(1, ge=1, le=64)
    """Number of layers in every core."""
    separate_trunks: bool = False
    """Use separate cores for the actor and the critic, with --policy lstm, gru, mingru or own."""
    feature_window: int = Field(0, ge=0, le=1024)
    """0: the feature LSTM keeps its state between steps; n: at every step, it starts
    from a zero state and reads the last n observations, as in arXiv 2212.02721."""
    memory: bool = True
    """Keep the recurrent state between steps; off: zero it before every step, to measure how much
    the memory helps."""
    log_std_init: float = Field(-0.5, ge=-5, le=2)
    """Initial log standard deviation of continuous actions."""
    noise_color: float = Field(0.0, ge=0, le=2)
    """Correlation over time of the noise that is added to continuous actions: 0 is white noise, 1
    pink noise. Values from 0.5 to 1 let exploration find sparse rewards that white noise misses."""

    def __post_init__(self) -> None:
        if bool(self.core) != (self.policy == "own"):
            raise ValueError(
                f"core {self.core!r} does not fit policy {self.policy}: use --policy own --core "
                "module:Class"
            )
        if self.feature_window and self.policy != "clstm":
            raise ValueError(
                f"feature_window does not fit policy {self.policy}: omit it or use --policy clstm"
            )

    @property
    def stateless(self) -> bool:
        """Return True if the policy's outputs do not depend on earlier steps."""
        return self.policy == "mlp" or not self.memory


class Settings(Protocol):
    """The sections of a configuration that the learner reads; see `agents.config.RunConfig`."""

    @property
    def launch(self) -> LaunchConfig:
        """Precision and strategy."""

    @property
    def train(self) -> TrainConfig:
        """Length, sizes and checkpoints."""

    @property
    def ppo(self) -> PPOConfig:
        """Hyperparameters of PPO."""

    @property
    def policy(self) -> PolicyConfig:
        """Kind and sizes of the network."""

    def to_dict(self) -> dict[str, Any]:
        """Return all values by section and name, in the format of config.json."""


class LearnerRun(Protocol):
    """The attributes of a run that the learner reads; see `agents.run.start.Run`."""

    @property
    def directory(self) -> RunDir:
        """The run directory."""

    @property
    def config(self) -> Settings:
        """The configuration."""

    @property
    def strategy(self) -> StrategyConfig:
        """Settings of the strategy by which the ranks share the work."""
