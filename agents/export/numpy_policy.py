"""A trained policy in numpy alone, read from the policy.safetensors of an export.

policy = NumpyPolicy("policy.safetensors")
state = policy.initial_state(1)
action, state = policy(obs[None], state, np.array([episode_begins_here]))
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

Array = np.ndarray


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
        net, count = self.net, len(obs)
        wanted = [(count, len(self.tensors["shift"])), (count, net["state_size"]), (count,)]
        found = [np.shape(given) for given in (obs, state, episode_start)]
        if found != wanted:
            raise ValueError(f"obs, state and episode_start must be {wanted}, got {found}")
        state = np.where(episode_start[:, None], np.float32(0), state)
        seen = (np.asarray(obs, np.float32) - self.tensors["shift"]) * self.tensors["scale"]
        seen = np.clip(seen, -net["clip"], net["clip"]) if net["normalize"] else obs
        shape = (net["actor_states"] + net["feature_states"], count, net["hidden_size"])
        vectors = np.zeros(shape, np.float32)  # [S, B, H]; they stay zeros without memory
        kept = net["memory_size"] // net["hidden_size"]
        memory = state[:, : net["memory_size"]].reshape(count, kept, net["hidden_size"])
        vectors[:kept] = memory.swapaxes(0, 1)
        own, features = vectors[: net["actor_states"]], vectors[net["actor_states"] :]
        rows = np.concatenate([state[:, net["memory_size"] :], seen], axis=1)
        for row in np.split(rows, rows.shape[1] // seen.shape[1], axis=1):  # one, or a window
            values, features = self._core("feature_core", self._encode(row), features)
        if "feature_mlp.0.weight" in self.tensors:
            values = np.tanh(self._linear("feature_mlp.0", values))
        values, own = self._core("actor_core", values, own)
        vectors = np.concatenate([own, features])[:kept].swapaxes(0, 1)
        after = np.concatenate(
            [vectors.reshape(count, net["memory_size"]), rows[:, seen.shape[1] :]], axis=1
        )
        return self._action(self._linear("actor_head", values), seen), after

    def _linear(self, name: str, inputs: Array) -> Array:
        return inputs @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]

    def _core(self, name: str, inputs: Array, state: Array) -> tuple[Array, Array]:
        after, cell, num_layers = list(state), self.net["cell"], self.net["layers"]
        for layer in range(num_layers if name in self.net["cores"] else 0):
            if cell == "tanh":
                inputs = np.tanh(self._linear(f"{name}.{2 * layer}", inputs))
                continue
            if cell == "mingru":
                gate, new = np.split(self._linear(f"{name}.layers.{layer}", inputs), 2, axis=1)
                inputs = sigmoid(-gate) * state[layer] + sigmoid(gate) * new
            else:
                x, h = (
                    values @ self.tensors[f"{name}.weight_{way}_l{layer}"].T
                    + self.tensors[f"{name}.bias_{way}_l{layer}"]
                    for way, values in (("ih", inputs), ("hh", state[layer]))
                )
                if cell == "gru":
                    (r, z, n), (hr, hz, hn) = np.split(x, 3, axis=1), np.split(h, 3, axis=1)
                    new, keep = np.tanh(n + sigmoid(r + hr) * hn), sigmoid(z + hz)
                    inputs = keep * state[layer] + (1 - keep) * new
                else:
                    i, f, g, o = np.split(x + h, 4, axis=1)
                    new = sigmoid(f) * state[num_layers + layer] + sigmoid(i) * np.tanh(g)
                    after[num_layers + layer] = new
                    inputs = sigmoid(o) * np.tanh(new)
            after[layer] = inputs
        return inputs, np.array(after, np.float32).reshape(state.shape)

    def _encode(self, row: Array) -> Array:
        images, parts = 0, []
        for part in self.contract["inputs"][0]["parts"]:
            values = row[:, slice(*part["columns"])]
            if part["kind"] == "image":
                values = self._image(f"feature_encoder.images.{images}", values, part["shape"])
                images += 1
            parts += [values] if part["kind"] != "mask" else []
        return np.concatenate(parts, axis=1)

    def _image(self, name: str, values: Array, shape: list[int]) -> Array:
        maps, layer = values.reshape(-1, *shape), 0  # [B, C, H, W]
        while f"{name}.{layer}.weight" in self.tensors:
            weights = self.tensors[f"{name}.{layer}.weight"]
            padded = np.pad(maps, ((0, 0), (0, 0), (1, 1), (1, 1)))
            patches = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
            sums = np.tensordot(patches[:, :, ::2, ::2], weights, ((1, 4, 5), (1, 2, 3)))
            maps = np.maximum(sums + self.tensors[f"{name}.{layer}.bias"], 0).transpose(0, 3, 1, 2)
            layer += 2  # ReLUs, and a Flatten before the layer, are modules without weights
        return np.tanh(self._linear(f"{name}.{layer + 1}", maps.reshape(len(maps), -1)))

    def _action(self, actor: Array, seen: Array) -> Array:
        net = self.net
        if net["mask_columns"]:
            actor = np.where(seen[:, net["mask_columns"]] > 0.5, actor, -1e9)
        if net["choices"]:
            each = np.split(actor, np.cumsum(net["choices"])[:-1], axis=1)
            actions = np.stack([logits.argmax(1) for logits in each], axis=1) + net["start"]
        else:
            means = np.tanh(actor) if net["squash"] else actor
            stretched = means * self.tensors["stretch"] + self.tensors["offset"]
            actions = np.clip(stretched, self.tensors["low"], self.tensors["high"])
        return actions.reshape(len(actor), *net["action_shape"])


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))
