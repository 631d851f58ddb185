"""Forwards that are recorded as they run: in one graph, or with a break at every split op (no
compiler, no trace).
"""

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
HostArgumentsOfSize = Callable[[int], Mapping[str, Any]]
"""For a number of tokens, what `kernels.graph.HostArguments` gives."""


def _weights(forward: Forward) -> Mapping[str, torch.Tensor]:
    """What graphs of a forward read at addresses that others may change: a model's parameters and
    buffers.
    """
    if isinstance(forward, PiecewiseForward):
        return forward.weights
    return (
        dict(forward.named_parameters()) | dict(forward.named_buffers())
        if isinstance(forward, nn.Module)
        else {}
    )


class FullForward:
    """The whole forward in one graph, attention too: for batches of pure decodes, by the number of
    which all shapes are set.

    `host_arguments`: what its kernels do not read from tensors; None: nothing.
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
    """The forward runs once while it is recorded; each split op ends a graph, runs between, and
    begins the next.
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
