"""An exported step as a list of layers and their tensors, for the numpy runner."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agents.export.step import ExportedStep
from agents.network.cores import GRUCore, LSTMCore, MinGRUCore

Layer = dict[str, Any]


class Layers:
    """What the runner computes: `network` for the contract, `tensors` by name."""

    def __init__(self, step: ExportedStep) -> None:
        self.policy = policy = step.policy
        self.size = policy.config.hidden_size
        self.tensors: dict[str, np.ndarray] = {}
        self._numbers = count()
        own, features = policy.actor_core, policy.feature_core
        joint = [self._linear("tanh", each) for each in _linears(policy.feature_mlp)]
        head = "tanh" if policy.config.squash_actions else "linear"
        self.network: dict[str, Any] = {
            "parts": self._parts(),
            "feature_layers": self._core(features, own.num_states),
            "actor_layers": [*joint, *self._core(own, 0), self._linear(head, policy.actor_head)],
            "memory_size": step.memory_size,
            "vectors_size": (own.num_states + features.num_states) * self.size,
            "state_size": step.state_size,
            "mask_columns": policy.mask_columns,
            "action_shape": list(step.action_shape),
        }
        self._keep(shift=step.shift, scale=step.scale, clip=torch.tensor(step.clip))
        if not step.normalize:
            self._keep(shift=0 * step.shift, scale=0 * step.scale + 1, clip=torch.tensor(torch.inf))
        if not policy.discrete:
            bounds = {name: getattr(step, name) for name in ("stretch", "offset", "low", "high")}
            self._keep(**bounds)

    def _keep(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self.tensors[name] = tensor.detach().numpy().astype(np.float32)

    def _layer(self, kind: str, weight: Tensor, bias: Tensor, **more: Any) -> Layer:
        """Keep a layer's tensors; its state is columns of the memory, none by default."""
        name = f"layer_{next(self._numbers)}"
        self._keep(**{f"{name}.weight": weight, f"{name}.bias": bias})
        return {"kind": kind, "name": name, "state": [0, 0], "cell": [0, 0]} | more

    def _linear(self, kind: str, layer: nn.Linear) -> Layer:
        return self._layer(kind, layer.weight, layer.bias)

    def _parts(self) -> list[list[Any]]:
        """Return columns of a row and what encodes them, of every part but masks."""
        images = iter(self.policy.feature_encoder.images)
        found = []
        for part, place in self.policy.layout.slices():
            layers = self._image(next(images), part.shape) if part.kind == "image" else []
            found += [[[place.start, place.stop], layers]] if part.kind != "mask" else []
        return found

    def _image(self, encoder: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
        """Return convolutions, each with the shape [C, H, W] that it reads, and the layer."""
        layers = []
        for module in encoder.children():
            if isinstance(module, nn.Conv2d):
                assert module.bias is not None
                layers.append(self._layer("conv", module.weight, module.bias, shape=list(shape)))
                shape = (len(module.weight), *((side + 1) // 2 for side in shape[1:]))
        return [*layers, *(self._linear("tanh", each) for each in _linears(encoder))]

    def _core(self, core: Any, first: int) -> list[Layer]:
        """Return the layers of a core whose vectors in the memory begin with number `first`."""
        kind = "tanh"
        joined: list[tuple[Tensor, Tensor]] = [(one.weight, one.bias) for one in _linears(core)]
        if isinstance(core, LSTMCore):
            kind = "lstm"
            joined = [(torch.cat([x, h], 1), a + b) for x, h, a, b in core.all_weights]
        elif isinstance(core, GRUCore):
            kind, joined = "gru", [_joined_gru(*weights) for weights in core.all_weights]
        elif isinstance(core, MinGRUCore):  # whose gates do not read the state
            kind = "mingru"
            joined = [
                (nn.functional.pad(each.weight, (0, self.size)), each.bias)
                for each in _linears(core.layers)
            ]

        def columns(vector: int) -> list[int]:
            begin = (first + vector) * self.size
            return [begin, begin + self.size] if vector < core.num_states else [0, 0]

        return [
            self._layer(kind, *both, state=columns(layer), cell=columns(len(joined) + layer))
            for layer, both in enumerate(joined)
        ]


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [each for each in module.children() if isinstance(each, nn.Linear)]


def _joined_gru(
    of_input: Tensor, of_state: Tensor, one: Tensor, other: Tensor
) -> tuple[Tensor, Tensor]:
    """Return one weight [4H, I+H] and bias: reset, keep, the input's new, the state's new."""
    x, h = of_input.chunk(3), of_state.chunk(3)
    no_x, no_h = torch.zeros_like(x[2]), torch.zeros_like(h[2])
    rows = [(x[0], h[0]), (x[1], h[1]), (x[2], no_h), (no_x, h[2])]
    new = 2 * len(x[0])
    bias = torch.cat([one[:new] + other[:new], one[new:], other[new:]])
    return torch.cat([torch.cat(row, dim=1) for row in rows]), bias
