"""The trading task: its markets and spans, its environments, and how policies are compared."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

from envs.task import (
    Agent,
    EvaluationOptions,
    Records,
    Report,
    Results,
    RunAgent,
    Task,
    TaskSettings,
    TrainedAgent,
    TrainedAgents,
    Trial,
    Validation,
)
from envs.trading.config import (
    DataConfig,
    SimulatedMarketConfig,
    TradingConfig,
    data_digest,
)
from envs.trading.environment import TradingVectorEnv
from envs.trading.evaluation import (
    EQUAL_WEIGHT,
    performance,
    plot_equity,
    run_markets,
    summarize,
    text_table,
    write_daily,
)
from envs.trading.features import first_tradable_day
from envs.trading.market_data import (
    Market,
    Span,
    Spans,
    days_per_year,
    load_market,
    price_notes,
    split_spans,
)
from envs.trading.simulated_market import (
    buy_equal_weight,
    follow,
    memoryless,
    reference,
    simulate_markets,
    world_seeds,
)
from rl_dist.errors import printable
from rl_dist.files import plain_file
from rl_dist.run_dir import RunDir

NUM_VALID_WORLDS = 20
NUM_TEST_WORLDS = 50
ZEROED = "ablation: policy, state zeroed"
VALIDATED = ("sharpe", "annual_return", "exposure")  # figures that a validation records
SIMULATED = "memory benchmark: SIMULATED markets not used in training"
SPANS = {
    "train": "training span, in sample: the policy was trained on these days",
    "valid": "validation span: use these days to choose settings",
    "test": "test span",
}


class TradingTask(Task):
    """Trains on daily stock trading with real or simulated prices; scored by the Sharpe ratio.

    Training, validation and test use different simulated markets.
    """

    scored_by = "sharpe"
    metrics = (*VALIDATED, "equal_weight_sharpe")

    def __init__(self, settings: TaskSettings) -> None:
        self.settings = settings
        self.data: DataConfig = settings.sections["data"]
        self.simulated: SimulatedMarketConfig = settings.sections["market"]
        self.trading: TradingConfig = settings.sections["trading"]

    @property
    def watermark(self) -> str:  # type: ignore[override]
        """Text across plots of simulated results, because such profit must not look real."""
        return "" if self.real else "SIMULATED"

    @cached_property
    def real(self) -> Market | None:
        """The market of the data file, with real prices; None if markets are simulated."""
        if self.data.data == "simulated":
            return None
        return load_market(self.data.data, missing=self.data.data_missing)

    @cached_property
    def sample(self) -> Market:
        """The real market; without one, the first simulated market for training."""
        return self.real or self.markets("train", 1)[0]

    @cached_property
    def spans(self) -> Spans:
        """The training, validation and test spans, which are the same in all markets."""
        first_tradable = first_tradable_day(self.sample, self.trading)
        return split_spans(self.sample.dates, self.data, first_tradable=first_tradable)

    @cached_property
    def validation_markets(self) -> Sequence[Market]:
        """The markets of all validations."""
        return self.markets("valid")

    @cached_property
    def test_markets(self) -> Callable[[int | None], Sequence[Market]]:
        """A function from a number of markets to the test markets; it simulates them once."""
        return cache(partial(self.markets, "test"))

    def markets(self, purpose: str, count: int | None = None) -> Sequence[Market]:
        """Return the real market, or `count` simulated markets for one purpose."""
        if self.real is not None:
            return [self.real]
        counts = {
            "train": self.simulated.num_worlds,
            "valid": NUM_VALID_WORLDS,
            "test": NUM_TEST_WORLDS,
        }
        seeds = world_seeds(self.simulated, purpose, count or counts[purpose])
        return simulate_markets(self.simulated, seeds)

    def training_env(self, num_envs: int, env_offset: int = 0) -> TradingVectorEnv:
        """Make a batch of training environments; their seeds determine the episodes."""
        return TradingVectorEnv(
            num_envs,
            markets=self.markets("train"),
            span=self.spans["train"],
            config=self.trading,
            discount=self.settings.discount,
            device=self.settings.device,
        )

    def probe_env(self) -> TradingVectorEnv:
        """Make an environment with a single market, to read its spaces."""
        return self.evaluation_env(self.markets("train", 1), self.spans["train"])

    def evaluation_env(
        self, markets: Sequence[Market], span: Span, *, buy_once: bool = False
    ) -> TradingVectorEnv:
        """Make one environment per market; an episode covers the whole span.

        With `buy_once`, the order limit and the turbulence rule do not apply. Use it for a strategy
        that buys on the first day and does not trade afterwards.
        """
        config = self.trading
        if buy_once:
            config = replace(config, max_order=1.0, order_unit="value", turbulence_quantile=0.0)
        return TradingVectorEnv(
            len(markets),
            markets=markets,
            span=span,
            config=config,
            evaluation=True,
            train_span=self.spans["train"],
            device=self.settings.device,
        )

    def digest(self) -> str:
        """Return a digest that changes with the price file; "" for simulated prices."""
        return data_digest(self.data)

    # ---- validation and test

    def trial_runner(self, markets: Sequence[Market], span: Span) -> RunAgent:
        """Return a function that lets an agent trade once through some of the markets.

        A rule always gets the same results on the same markets, so it runs only once on them. All
        agents share the environments, because building them takes longer than a pass.
        """

        @cache
        def env_of(indices: range, buy_once: bool) -> TradingVectorEnv:
            return self.evaluation_env([markets[i] for i in indices], span, buy_once=buy_once)

        @cache
        def results_of_rule(rule: Any, indices: range) -> dict[str, list]:
            return run_markets(
                env_of(indices, rule is buy_equal_weight), rule, self.settings.heartbeat
            )

        def run(agent: Agent, indices: range) -> dict[str, list]:
            if not isinstance(agent, TrainedAgent):
                return results_of_rule(agent, indices)  # type: ignore[arg-type]
            return run_markets(env_of(indices, buy_once=False), agent, self.settings.heartbeat)

        return run

    @cached_property
    def _run_validation(self) -> RunAgent:
        return self.trial_runner(self.validation_markets, self.spans["valid"])

    def validation(self, agent: TrainedAgent, options: EvaluationOptions) -> Validation | None:
        """Return a pass over the validation span; None if there is no such span.

        Every pass takes the same number of steps, so `options.within_budget` is ignored.
        """
        if "valid" not in self.spans:
            return None
        markets = self.validation_markets
        year = days_per_year(markets[0].dates)

        def figures(records: Records) -> dict[str, float]:
            means = {
                name: {key: float(value.mean()) for key, value in performance(record, year).items()}
                for name, record in records.items()
            }
            metrics = {name: means["policy"][name] for name in VALIDATED}
            return metrics | {"equal_weight_sharpe": means[EQUAL_WEIGHT]["sharpe"]}

        return Validation(
            agents={"policy": agent, EQUAL_WEIGHT: buy_equal_weight},
            count=len(markets),
            run=self._run_validation,
            figures=figures,
        )

    def _tested_spans(self, options: EvaluationOptions) -> dict[str, Span]:
        """Return the spans that `tests` evaluates, by name."""
        names = ["test"] if self.real is None or options.open_test else ["train", "valid"]
        return {name: span for name, span in self.spans.items() if name in names}

    def tests(self, agents: TrainedAgents, options: EvaluationOptions) -> dict[str, Trial]:
        """Return one trial for each evaluated span: a pass over the markets.

        Simulated prices are evaluated on the test span. Real prices are evaluated on the training
        and validation spans or, with `open_test`, only on the test span. If the first policy is a
        cascaded LSTM, it is also evaluated without memory.
        """
        if options.writes and not options.after_training:
            print(self.describe())
        if self.real and options.open_test and options.writes:
            self._record_look(options.sources)
        traders: dict[str, Agent] = {**agents}
        if without_memory := agents["policy"].without_memory():
            traders[ZEROED] = without_memory
        if self.real is None and self.trading.order_unit == "value":
            edge = self.simulated.market_edge
            traders["reference"] = follow(partial(reference, market_edge=edge))
            traders["memoryless rule"] = follow(memoryless)
        traders[EQUAL_WEIGHT] = buy_equal_weight
        markets = self.test_markets(options.num_worlds)
        return {
            name: Trial(agents=traders, count=len(markets), run=self.trial_runner(markets, span))
            for name, span in self._tested_spans(options).items()
        }

    def _record_look(self, sources: Mapping[str, tuple[RunDir, int]]) -> None:
        """Record in each run directory that the run is evaluated on the test span.

        Print how often each run has been evaluated on the test span.
        """
        assert self.real is not None
        test = self.spans["test"]
        look = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "data_digest": self.digest(),
            "span": self.real.dates[[test.first, test.last]].astype(str).tolist(),
        }
        for name, (directory, iteration) in sources.items():
            path = directory.writable(directory.test_looks)
            with open(path, "a+", opener=plain_file) as file:
                file.write(json.dumps(look | {"iteration": iteration}) + "\n")
                file.seek(0)
                number = len(file.readlines())
            print(f"{name}: evaluation {number} on the test span, recorded in {path}")

    def report(self, results: Results, options: EvaluationOptions) -> Report:
        """Compare the agents on every evaluated span; return a summary per span and a text.

        Write the daily results of every span and the equity curves of the last span to files.
        """
        simulated = self.real is None
        directory = options.directory
        picture = options.picture or directory.picture("evaluation")
        markets = self.test_markets(options.num_worlds)
        spans = self._tested_spans(options)
        summaries: dict = {}
        text = ""
        for name, span in spans.items():
            dates = markets[0].dates[span.first : span.last + 1]
            summaries[name] = summarize(results[name], dates)
            title = SIMULATED if simulated else SPANS[name]
            text += f"{title}\n{text_table(summaries[name], simulated)}\n\n"
            if options.writes:
                path = directory.evaluation / f"{name}.csv"
                write_daily(directory.writable(path), results[name], markets, dates)
                plot_equity(results[name], dates, picture, name, self.watermark)
        text += (
            "in brackets: 95 % interval over markets or, for one market, resampled blocks of days\n"
            f"risk-free rate: 0; costs: {self.trading.fee_bps:g} bps of every purchase and sale\n"
            f"daily figures: {directory.evaluation}\nequity curves: {picture}"
        )
        if "test" not in spans:
            text += (
                "\nThe test span was not evaluated. After all choices are made, evaluate it with:\n"
                f"  python -m agents.evaluate {directory.path} --open_test"
            )
        return summaries, text

    def describe(self) -> str:
        """Return lines about the data, the spans and unusual properties of real prices."""
        market = self.sample
        notes = ""
        data = f"{len(market.tickers)} stocks, {len(market.dates)} days of "
        if self.real:
            data += printable(self.data.data)
            notes = "".join(f"\nnote: {printable(n)}" for n in price_notes(market, self.trading))
        else:
            data += (
                f"a SIMULATED market (edge {self.simulated.market_edge:g} bps/day, market seed "
                f"{self.simulated.market_seed}): a test bed for memory, not a promise of profit"
            )
        spans = (
            f"{name} {market.dates[span.first]} to {market.dates[span.last]}"
            for name, span in self.spans.items()
        )
        return f"data: {data}\ndays: {'; '.join(spans)}{notes}"
