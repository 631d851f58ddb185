"""A platform whose graphs record what runs, as a device's do: by address alone, on memory that is
poisoned when nobody holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from piecework.kernels.cpu.graph import CpuGraphPool
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.graph import HostArguments, Work, weak_ref_tensor

_POISON = 0xFF
"""Bytes of memory that holds nothing: NaN as a float, -1 as an integer."""


class PoisonedPool(CpuGraphPool):
    """Fills memory with poison when it is given out and when it comes back; refuses the captures
    that a device's allocator refuses.
    """

    def __init__(self) -> None:
        super().__init__()
        self._graphs = 0
        self._used = self.recording = False

    def begin(self) -> None:
        """Raises RuntimeError where all graphs of the pool are gone, and where a capture into it
        never came to its end.
        """
        if self._used and not self._graphs:
            raise RuntimeError(
                "it->second->use_count > 0 INTERNAL ASSERT FAILED: all graphs of the pool are gone"
            )
        self._graphs += 1
        if self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self._used = self.recording = True

    def captured(self, graph: RecordedGraph) -> None:
        self.recording = False
        weakref.finalize(graph, self.release).atexit = False

    def release(self) -> None:
        self._graphs -= 1

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        owner = super().like(tensor)
        _poison(owner)
        return owner

    def _give_back(self, buffer: torch.Tensor) -> None:
        buffer.fill_(_POISON)
        super()._give_back(buffer)


class RecordedGraph:
    """Ops in order, with the addresses of their arguments and results."""

    def __init__(self, platform: RecordingPlatform) -> None:
        self._platform = platform
        self._launches: list[Callable[[], None]] = []
        self._results: list[torch.Tensor] = []
        self._pool: PoisonedPool | None = None
        self._number = -1
        self._captured = False

    def capture(self, work: Work, pool: PoisonedPool, stream: Any) -> list[torch.Tensor]:
        self.begin(pool, stream)
        try:
            return list(work())
        finally:
            self.end()

    def begin(self, pool: PoisonedPool, stream: Any) -> None:
        pool.begin()
        self._number = self._platform.count_capture()
        self._platform.recorder.record_into(self, pool)
        self._pool = pool

    def end(self) -> None:
        self._platform.recorder.record_into(None, None)
        if self._number in self._platform.invalidate_at:
            raise RuntimeError("operation failed due to a previous error during capture")
        assert self._pool is not None
        self._pool.captured(self)
        self._captured = True
        # A capture launches nothing: what its ops would have written is not there yet.
        for result in self._results:
            _poison(result)

    def replay(self) -> None:
        if not self._captured:
            raise RuntimeError("Called replay without a preceding successful capture.")
        self._platform.replays += 1
        for launch in self._launches:
            launch()

    def add(self, launch: Callable[[], None], results: list[torch.Tensor]) -> None:
        self._launches.append(launch)
        self._results += results


class _Recorder(TorchDispatchMode):
    """Sees every op. It is entered as long as a graph is recorded, and stays so through an op that
    ends one and begins the next.
    """

    def __init__(self) -> None:
        super().__init__()
        self._graph: RecordedGraph | None = None
        self._pool: PoisonedPool | None = None
        self._entered = self._in_op = False

    def record_into(self, graph: RecordedGraph | None, pool: PoisonedPool | None) -> None:
        self._graph, self._pool = graph, pool
        if not self._in_op and (graph is not None) != self._entered:
            self._entered = graph is not None
            self.__enter__() if self._entered else self.__exit__(None, None, None)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, graph = kwargs or {}, self._graph
        self._in_op = True
        try:
            results = op(*args, **kwargs)
        finally:
            self._in_op = False
        if graph is not self._graph or graph is None or op.is_view:
            return results
        return self._record(
            graph, op, results, *tree_map_only(torch.Tensor, weak_ref_tensor, (args, kwargs))
        )

    def _record(self, graph: RecordedGraph, op: Any, results: Any, args: Any, kwargs: Any) -> Any:
        fresh, structure = tree_flatten(results)
        if any(
            argument.alias_info and argument.alias_info.is_write
            for argument in op._schema.arguments
        ):
            graph.add(lambda: op(*args, **kwargs), [])
            return results
        assert self._pool is not None
        owners = [self._pool.like(tensor).copy_(tensor) for tensor in fresh]
        places = [weak_ref_tensor(owner) for owner in owners]

        def launch() -> None:
            for place, result in zip(places, tree_flatten(op(*args, **kwargs))[0], strict=True):
                place.copy_(result)

        graph.add(launch, places)
        return structure.unflatten(owners)


class RecordingPlatform(CpuPlatform):
    """`fail_at`: the number of a capture that the device refuses to begin, and how;
    `invalidate_at`: those that end without a graph.
    """

    graphs_are_real = True
    padding_limit = 8.0

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self.recorder = _Recorder()
        self.fail_at: dict[int, Exception] = {}
        self.invalidate_at: set[int] = set()

    def graph(self, host_arguments: HostArguments | None = None) -> RecordedGraph:  # type: ignore[override]
        return RecordedGraph(self)

    def graph_pool(self) -> PoisonedPool:
        return PoisonedPool()

    def abandon_graph_pool(self, pool: PoisonedPool) -> None:  # type: ignore[override]
        if pool.recording:
            pool.recording = False
            pool.release()

    def count_capture(self) -> int:
        """The number of the capture that begins."""
        number = self.captures
        self.captures += 1
        if number in self.fail_at:
            raise self.fail_at[number]
        return number


def _poison(tensor: torch.Tensor) -> None:
    if tensor.numel():
        span = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
        )
        weak_ref_tensor(tensor.as_strided((span,), (1,))).view(torch.uint8).fill_(_POISON)
