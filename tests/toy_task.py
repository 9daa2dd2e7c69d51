"""A task of its own: repeat the coin shown a step earlier; scored by the share of hits."""

import torch
from gymnasium import spaces

from envs.task import TASKS, Task, Trial, Validation
from envs.vector.layout import Layout, TorchEnv

LENGTH = 5  # steps of an episode; the first has no coin to repeat


class CoinEnv(TorchEnv):
    """Episodes whose coins follow from seed and age, so that their state is two numbers."""

    layout = Layout.vector(2)
    single_action_space = spaces.Discrete(2)
    can_snapshot = True

    def __init__(self, num_envs):
        self.num_envs = num_envs

    def coins(self):
        return (self.seeds + self.ages * (self.ages + self.seeds) // 2) % 2

    def seen(self):
        return torch.stack([self.coins(), self.ages == 0], dim=1).float()

    def reset(self, *, seed):
        self.seeds, self.ages = torch.tensor(seed), torch.zeros(len(seed), dtype=torch.int64)
        self.earlier = self.coins()
        return self.seen(), {}

    def step(self, actions):
        rewards = ((actions == self.earlier) & (self.ages > 0)).double()
        self.earlier, self.ages = self.coins(), self.ages + 1
        last, ended = self.seen(), self.ages == LENGTH
        self.seeds, self.ages = self.seeds + ended, self.ages * ~ended
        final = torch.where(ended[:, None], last, self.seen())
        return self.seen(), rewards, ended, torch.zeros_like(ended), {"final_obs": final}

    def get_state(self):
        return {"seeds": self.seeds, "ages": self.ages, "earlier": self.earlier}

    def set_state(self, state):
        vars(self).update(state)


class CoinTask(Task):
    scored_by = "hits"
    metrics = ("hits",)

    def __init__(self, settings):
        self.count = settings.task.eval_episodes

    def describe(self):
        return f"coins: {LENGTH} per episode"

    def training_env(self, num_envs, env_offset=0):
        return CoinEnv(num_envs)

    def validation(self, agent, options):
        hits = lambda records: {"hits": float(records["policy"]["hits"].mean())}  # noqa: E731
        return Validation(**vars(self.trial({"policy": agent}, options)), figures=hits)

    def tests(self, agents, options):
        return {"coins": self.trial(agents, options)}

    def trial(self, agents, options):
        def run(agent, rows):
            env = self.training_env(len(rows))
            obs, hits = env.reset(seed=options.seeds(rows.start, len(rows)))[0], 0
            start = torch.ones(len(rows), dtype=torch.bool)
            for _ in range(LENGTH):
                obs, rewards, start, _, _ = env.step(agent(env, obs, start))
                hits = hits + rewards / (LENGTH - 1)
            return {"hits": hits.tolist()}

        return Trial(agents=agents, count=self.count, run=run)

    def report(self, results, options):
        means = {name: float(r["hits"].mean()) for name, r in results["coins"].items()}
        table = [f"{name} | {mean:.2f} of coins" for name, mean in means.items()]
        return {"test": means}, "\n".join(table)


TASKS["Coins-v0"] = "toy_task:CoinTask"
