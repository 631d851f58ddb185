"""Encodes one image in portions, so that other requests go on between them.

A portion is one layer of the vision tower for one part of the image, such as a tile. The code of
transformers computes a whole tower in one call. A part therefore takes three passes:

1. The tower's forward runs with layers that compute nothing and note their arguments.
2. The layers run one after another, a portion each.
3. The forward runs again with layers that return what was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..core.forward_context import layer_begins
from ..core.images import ImageInput
from .family import ImageFamily
from .tower import Tower

Tensors = dict[str, torch.Tensor]


class _Noted(Exception):
    """The last layer was reached: the rest of the forward is not needed yet."""


class EncodeJob:
    """One image on its way through the tower.

    Attributes:
        stages: When the job is done, the tensors of `StepImages.stages` for all rows of the image.
    """

    def __init__(
        self, tower: Tower, family: ImageFamily, image: ImageInput, dtype: torch.dtype
    ) -> None:
        self._tower, self._family, self._image = tower, family, image
        self.stages: list[torch.Tensor] | None = None
        self._dtype = dtype
        self._portions = self._run()

    def advance(self) -> float:
        """Compute one portion. Return its size in patches that pass the whole tower."""
        return next(self._portions, 0.0)

    @torch.inference_mode()
    def _run(self) -> Iterator[float]:
        device = next(self._tower.parameters()).device
        results: list[list[torch.Tensor]] = []
        tensors = {
            name: torch.from_numpy(tensor.array().copy()).to(device)
            for name, tensor in self._image.tensors.items()
        }
        for part in self._family.parts(tensors):
            result: list[torch.Tensor] = []
            yield from self._part(part, result)
            results.append(result)
        self.stages = self._family.joined(self._tower.model, tensors, results)
        rows = {len(stage) for stage in self.stages}
        if rows != {self._image.num_tokens}:
            raise ValueError(
                f"the encoder made {sorted(rows)} rows for the {self._image.num_tokens} positions "
                "of an image"
            )

    def _part(self, part: Tensors, result: list[torch.Tensor]) -> Iterator[float]:
        """Compute one part. Append its stages to `result`."""
        layers = self._tower.layers(self._family.layers)
        calls = self._note(layers, part)
        (hidden, *_), _ = calls[0]
        share = _patches(hidden) / len(layers)
        kept, outputs = self._family.read_layers(len(layers)), dict[int, torch.Tensor]()
        for number, (layer, (arguments, names)) in enumerate(zip(layers, calls, strict=True)):
            layer_begins()
            hidden = layer(hidden, *arguments[1:], **names)
            if number in kept:
                outputs[number] = hidden
            if number < len(layers) - 1:
                yield share
        last = hidden

        def give(number: int, *_: Any, **__: Any) -> torch.Tensor:
            result: torch.Tensor = outputs.get(number, last)
            return result

        with _replaced(layers, give):
            found = self._family.features(self._tower.model, part, self._dtype)
        result += [stage.flatten(0, -2) for stage in found]
        yield share

    def _note(
        self, layers: Sequence[nn.Module], part: Tensors
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of each layer. The first one is its hidden states."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def note(number: int, *arguments: Any, **names: Any) -> Any:
            if not arguments:
                arguments = (names.pop("hidden_states"),)
            calls.append((arguments, names))
            if number == len(layers) - 1:
                raise _Noted
            return arguments[0]

        try:
            with _replaced(layers, note):
                self._family.features(self._tower.model, part, self._dtype)
        except _Noted:
            return calls
        raise ValueError(f"the vision tower has no layers {self._family.layers}")


def _patches(hidden: torch.Tensor) -> int:
    """Return the number of patches of hidden states [..., width]."""
    return hidden.numel() // hidden.shape[-1]


@contextmanager
def _replaced(layers: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Call `forward(number of the layer, *arguments)` instead of the forward of each layer."""

    def of(number: int) -> Callable[..., Any]:
        return lambda *arguments, **names: forward(number, *arguments, **names)

    for number, layer in enumerate(layers):
        layer.forward = of(number)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
