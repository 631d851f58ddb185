"""Forwards recorded without trace or compiler, in one graph or with breaks at split ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .core.split_ops import Implementation, recording_around_split_ops
from .piecewise import PiecewiseForward
from .recording import Recorder, Recording

Forward = Callable[..., torch.Tensor]
# Maps a number of tokens to the arguments of `kernels.graph.HostArguments`.
HostArgumentsOfSize = Callable[[int], Mapping[str, Any]]


def _weights(forward: Forward) -> Mapping[str, torch.Tensor]:
    """Return the parameters and buffers of a forward, whose addresses must not change."""
    if isinstance(forward, PiecewiseForward):
        return forward.weights
    return (
        dict(forward.named_parameters()) | dict(forward.named_buffers())
        if isinstance(forward, nn.Module)
        else {}
    )


class FullForward:
    """The whole forward in one graph, attention included, for batches of decodes.

    The number of decodes determines all shapes. `host_arguments` returns the arguments that kernels
    do not read from tensors. It is None if there are none.
    """

    def __init__(self, forward: Forward, host_arguments: HostArgumentsOfSize | None = None) -> None:
        self._forward, self._host_arguments = forward, host_arguments

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._forward(*inputs)

    def record(self, inputs: Sequence[torch.Tensor], recorder: Recorder) -> Recording:
        recorder.watch(_weights(self._forward))
        host = (
            partial(self._host_arguments, len(inputs[0]))
            if self._host_arguments is not None
            else None
        )
        (output,) = recorder.graph(lambda: [self._forward(*inputs)], "the whole forward", host)
        return recorder.finish(output)


class BreakableForward:
    """Records the forward while it runs once. Each split op ends a graph, runs, and starts the next
    graph.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._forward(*inputs)

    def record(self, inputs: Sequence[torch.Tensor], recorder: Recorder) -> Recording:
        def around(implementation: Implementation, arguments: tuple[Any, ...]) -> Any:
            recorder.pause()
            results = recorder.call(implementation, arguments)
            recorder.begin()
            return results[0] if results else None

        recorder.watch(_weights(self._forward))
        recorder.begin()
        with recording_around_split_ops(around):
            output = self._forward(*inputs)
        return recorder.finish(output)
