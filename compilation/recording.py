"""The recording of a forward at one size: graphs, and calls without arguments between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ..kernels.graph import Graph, HostArguments, Work
from ..kernels.platform.graph_capture import GraphCapture
from .core.split_ops import Implementation


class Recording:
    """A forward recorded at one number of tokens, with `num_graphs` graphs."""

    def __init__(
        self,
        steps: list[Callable[[], Any]],
        output: torch.Tensor,
        watched: Mapping[str, torch.Tensor],
        kept: list[torch.Tensor],
        num_graphs: int,
    ) -> None:
        self._steps = steps
        self._output = output
        self._addresses = {name: (tensor, tensor.data_ptr()) for name, tensor in watched.items()}
        self._kept = kept
        self.num_graphs = num_graphs

    def replay(self) -> torch.Tensor:
        """Run the recording on the current content of the static inputs.

        The next replay of any size overwrites the result.
        """
        for step in self._steps:
            step()
        return self._output

    def moved_input(self) -> str | None:
        """Return the name of a tensor that graphs read and that has moved since the recording, or
        None.
        """
        return next(
            (
                name
                for name, (tensor, address) in self._addresses.items()
                if tensor.data_ptr() != address
            ),
            None,
        )


class Recordable(Protocol):
    """A forward that can run directly, or be recorded on given inputs."""

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor: ...

    def record(self, inputs: Sequence[torch.Tensor], recorder: Recorder) -> Recording: ...


class Recorder:
    """Collects the steps of one recording in the order of their replay."""

    def __init__(self, platform: GraphCapture, pool: Any, stream: Any) -> None:
        self._platform, self._pool, self._stream = platform, pool, stream
        self._steps: list[Callable[[], Any]] = []
        self._watched: dict[str, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        self._graphs = 0
        self._open: Graph | None = None

    def graph(
        self, work: Work, label: str, host_arguments: HostArguments | None = None
    ) -> list[torch.Tensor]:
        """Record `work` as a graph and return its outputs. The caller holds the only references.

        `work` must hold weak references to its inputs.
        """
        graph = self._platform.graph(host_arguments)
        try:
            outputs = graph.capture(work, self._pool, self._stream)
        except Exception as error:
            error.add_note(label)
            raise
        self._add(graph)
        return outputs

    def begin(self) -> None:
        """Record all launches until `pause` or `finish`."""
        graph = self._platform.graph()
        graph.begin(self._pool, self._stream)
        self._open = graph

    def pause(self) -> None:
        """End the graph that `begin` started."""
        if self._open is not None:
            graph, self._open = self._open, None
            graph.end()
            self._add(graph)

    def call(self, implementation: Implementation, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """Run `implementation` now, outside of graphs, and at each replay.

        A replay copies the result to the address of the first result.
        """
        arguments = [self.weak(argument) for argument in arguments]
        with self._platform.on_stream(self._stream):
            result = implementation(*arguments)
        if result is None:
            self._steps.append(partial(implementation, *arguments))
            return []
        self._kept.append(result)
        self._steps.append(lambda: result.copy_(implementation(*arguments)))
        return [result]

    def watch(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note tensors that graphs read by address only."""
        self._watched.update(tensors)

    def weak(self, value: Any) -> Any:
        return self._platform.weak_ref_tensor(value) if isinstance(value, torch.Tensor) else value

    def abandon(self) -> None:
        """End the graph that is being recorded, if there is one. Called after a failure, so errors
        of the end itself are ignored.
        """
        graph, self._open = self._open, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):
                graph.end()

    def finish(self, output: torch.Tensor) -> Recording:
        self.pause()
        return Recording(self._steps, self.weak(output), self._watched, self._kept, self._graphs)

    def _add(self, graph: Graph) -> None:
        self._steps.append(graph.replay)
        self._graphs += 1
