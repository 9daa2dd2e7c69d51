"""A trained policy in numpy alone, read from the policy.safetensors of an export.

policy = NumpyPolicy("policy.safetensors")
state = policy.initial_state(1)
action, state = policy(obs[None], state, np.array([episode_begins_here]))
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray as Array  # noqa: N812  # a type


class NumpyPolicy:
    """Maps rows [B, F], state [B, D] and episode_start [B] to actions and state."""

    def __init__(self, path: str | Path) -> None:
        data = Path(path).read_bytes()
        first = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:first])
        self.contract = json.loads(header.pop("__metadata__")["contract"])
        self.net = self.contract["network"]
        self.tensors: dict[str, Array] = {}
        for name, part in header.items():
            begin, end = (first + offset for offset in part["data_offsets"])
            self.tensors[name] = np.frombuffer(data[begin:end], "<f4").reshape(part["shape"])

    def initial_state(self, batch: int) -> Array:
        """Return the state [B, D] before the first step."""
        return np.zeros((batch, self.net["state_size"]), np.float32)

    def __call__(self, obs: Array, state: Array, episode_start: Array) -> tuple[Array, Array]:
        """Return actions in the environment's units, and the state [B, D] after them."""
        net, count, kept = self.net, len(obs), self.net["memory_size"]
        wanted = [(count, len(self.tensors["shift"])), (count, net["state_size"]), (count,)]
        found = [np.shape(given) for given in (obs, state, episode_start)]
        if found != wanted:
            raise ValueError(f"obs, state and episode_start must be {wanted}, got {found}")
        state = np.where(episode_start[:, None], np.float32(0), state)
        seen = (np.asarray(obs, np.float32) - self.tensors["shift"]) * self.tensors["scale"]
        seen = np.clip(seen, -self.tensors["clip"], self.tensors["clip"])
        rows = np.concatenate([state[:, kept:], seen], axis=1)
        memory = np.zeros((count, net["vectors_size"]), np.float32)  # more than is kept
        memory[:, :kept] = state[:, :kept]
        for row in np.split(rows, rows.shape[1] // seen.shape[1], axis=1):  # one, or a window
            parts = [self._run(layers, row[:, slice(*at)], memory) for at, layers in net["parts"]]
            values = self._run(net["feature_layers"], np.concatenate(parts, axis=1), memory)
        actor = self._run(net["actor_layers"], values, memory)
        after = np.concatenate([memory[:, :kept], rows[:, seen.shape[1] :]], axis=1)
        return self._action(actor, seen), after

    def _run(self, layers: list[dict[str, Any]], values: Array, memory: Array) -> Array:
        """Return what layers make of values; each keeps its state in columns of the memory."""
        for layer in layers:
            kind, own, cell = layer["kind"], slice(*layer["state"]), slice(*layer["cell"])
            weight, bias = (self.tensors[f"{layer['name']}.{each}"] for each in ("weight", "bias"))
            if kind == "conv":
                maps = values.reshape(-1, *layer["shape"])  # [B, C, H, W]
                padded = np.pad(maps, ((0, 0), (0, 0), (1, 1), (1, 1)))
                patches = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
                sums = np.tensordot(patches[:, :, ::2, ::2], weight, ((1, 4, 5), (1, 2, 3)))
                values = np.maximum(sums + bias, 0).transpose(0, 3, 1, 2)
                continue
            before = memory[:, own]  # [B, H], or nothing
            inputs = np.concatenate([values.reshape(len(values), -1), before], axis=1)
            gates = inputs @ weight.T + bias
            if kind in ("linear", "tanh"):
                values = np.tanh(gates) if kind == "tanh" else gates
            elif kind == "mingru":
                gate, new = np.split(gates, 2, axis=1)
                values = memory[:, own] = sigmoid(-gate) * before + sigmoid(gate) * new
            elif kind == "gru":
                reset, keep, new, old = np.split(gates, 4, axis=1)
                new, keep = np.tanh(new + sigmoid(reset) * old), sigmoid(keep)
                values = memory[:, own] = keep * before + (1 - keep) * new
            else:
                add, keep, new, show = np.split(gates, 4, axis=1)
                memory[:, cell] = sigmoid(keep) * memory[:, cell] + sigmoid(add) * np.tanh(new)
                values = memory[:, own] = sigmoid(show) * np.tanh(memory[:, cell])
        return values

    def _action(self, actor: Array, seen: Array) -> Array:
        net, made = self.net, self.contract["outputs"][0]
        if net["mask_columns"]:
            actor = np.where(seen[:, net["mask_columns"]] > 0.5, actor, -1e9)
        if made["choices"]:
            each = np.split(actor, np.cumsum(made["choices"])[:-1], axis=1)
            actions = np.stack([logits.argmax(1) for logits in each], axis=1) + made["start"]
        else:
            stretched = actor * self.tensors["stretch"] + self.tensors["offset"]
            actions = np.clip(stretched, self.tensors["low"], self.tensors["high"])
        return actions.reshape(len(actor), *net["action_shape"])


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))
