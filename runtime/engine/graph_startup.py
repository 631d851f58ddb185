"""Loads pieces and captures graphs while the engine serves.

The pieces come from the cache, which another process fills. The work is done in portions between
batches. With several ranks, a portion is either common, which all ranks do at the same time, or a
rank's own. The number of own portions may differ between ranks. Before the next common portion the
ranks agree on the result.

Neither this module nor its imports trace or compile. A piece that the cache lacks after the other
process has ended is not used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from typing import Any

import torch

from ...compilation.by_length import ForwardByLength
from ...compilation.capture import Reason
from ...compilation.core.errors import CaptureError, NotStoredError
from ...compilation.piece_store import PieceStore, PreparedForward
from ...compilation.piecewise import PiecewiseForward
from ...compilation.whole import BreakableForward
from ..config.engine import Backend
from ..core.engine_info import describe_passes
from ..executor.model_runner import ModelRunner
from ..graphs.compile_process import CompileProcess, Outcome, start
from ..graphs.pieces import piece_store, stored_key
from ..graphs.prefill import PrefillGraph
from ..process.progress import progress_bar

logger = logging.getLogger(__name__)

# A check of the longest step waits for running requests, but only until this time after the start.
_PATIENCE_SECONDS = 120.0


class _NoPieces(Exception):
    """Steps do not run in pieces, for `reason`."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(" ".join(text.split())[:300])
        self.reason = reason


_ON_ANOTHER_RANK = _NoPieces(Reason.WRONG_RESULT, "another rank failed")
# The result of loading the pieces on one rank. The ranks agree on the minimum.
_LOADED, _NOT_STORED, _BROKEN = 2, 1, 0


class GraphStartup:
    """The work that is done between batches, in portions. `pending` is False when all is done."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._began = time.perf_counter()
        self._compiling: CompileProcess | None = None
        self._outcome: Outcome | None = None  # The compiling process had this one.
        self._next_is_long = False
        self._ranks = runner.ranks
        graphs = runner.graphs
        self.pending = {graphs.prefill_backend, graphs.decode_backend} != {Backend.DISABLED}
        self._next_is_own = graphs.prefill_backend is Backend.PIECEWISE
        self._work = self._portions()
        if self.pending and not self._next_is_own and self._ranks.rank == 0:
            self.advance()

    def advance(self, *, busy: bool = False) -> None:
        """Do the next portion on rank 0: load a piece, poll the compiler, run a piece to check it,
        or capture one graph.

        If requests are running (`busy`), a long portion waits up to `_PATIENCE_SECONDS`.
        """
        if busy and self._next_is_long and time.perf_counter() < self._began + _PATIENCE_SECONDS:
            return
        self._ranks.call("advance", self._next_is_own)
        self._next()

    def follow(self, own: bool) -> None:
        """Follow rank 0 on another rank. Rank 0 does a portion of its `own`, or a common one."""
        while self._next_is_own:
            self._next()
            if own:
                return
        if not own:
            self._next()

    def complete(self, *, progress: bool = False) -> None:
        """Do all portions now (`--startup full`)."""
        bar: Any = None
        while self.pending:
            if self._compiling is not None:
                self._compiling.wait()
            self.advance()
            sizes = self._runner.graphs.num_pending
            if bar is None and sizes and progress:
                bar = progress_bar(total=sizes, desc="capturing graphs", unit=" sizes", leave=False)
            if bar is not None:
                bar.update(bar.total - sizes - bar.n)
        if bar is not None:
            bar.close()

    def stop(self) -> None:
        """Stop the compiling process, if it still runs."""
        self.pending = False
        if self._compiling is not None:
            self._compiling.stop()

    def _next(self) -> None:
        self.pending = self.pending and next(self._work, None) is not None

    def _portions(self) -> Iterator[bool]:
        """Yield after each portion. The value says nothing."""
        graphs = self._runner.graphs
        forwards: list[PiecewiseForward | ForwardByLength | BreakableForward | None] = []
        for kind in graphs.kinds:
            if kind.prefill is not None and graphs.prefill_backend is Backend.PIECEWISE:
                forwards.append((yield from self._pieces(kind.prefill, kind.adapters is not None)))
            else:
                is_breakable = graphs.prefill_backend is Backend.BREAKABLE
                forwards.append(BreakableForward(self._runner.model) if is_breakable else None)
        try:
            graphs.use(*forwards)
        except Exception as error:
            if self._ranks.size > 1:
                raise
            # Buffers and plans of graphs take memory too. Without them, steps stay eager.
            logger.warning(
                "steps run eagerly: %s; --disable-cuda-graph spares the attempt",
                " ".join(str(error).split())[:300],
            )
        else:
            yield True
            while graphs.capture_next():
                yield True
        self._log_graphs()

    def _pieces(
        self, prefill: PrefillGraph, adapters: bool
    ) -> Generator[bool, None, PiecewiseForward | ForwardByLength | BreakableForward | None]:
        """Return the forward in pieces, if the cache has it and it equals the model's forward.

        Otherwise return the forward that is recorded without pieces, or None for eager steps.
        `adapters`: whether the forward adds updates of adapters.
        """
        runner = self._runner
        try:
            forward, report = yield from self._stored(adapters)
            pieces = sum(len(part.plan.pieces) for part in forward.parts)
            if len(report.failed) == pieces:
                raise _NoPieces(
                    Reason.COMPILE_FAILED,
                    f"none of its pieces can be compiled: {next(iter(report.failed.values()))}",
                )
            yield True
            checks = self._agreed(prefill.check(forward))
            for self._next_is_long in checks:
                yield True
            self._next_is_long = False
        except Exception as error:
            why = error if isinstance(error, _NoPieces) else _NoPieces(_reason(error), str(error))
            prefill.give_up(why.reason)
            if not runner.platform.graphs_are_real:
                logger.warning(
                    "steps run eagerly: the model does not run in pieces (%s); "
                    "--disable-piecewise-cuda-graph spares the attempt",
                    why,
                )
                return None
            logger.warning(
                "the model does not run in pieces (%s); it is recorded as it runs: "
                "--cuda-graph-backend-prefill breakable",
                why,
            )
            return BreakableForward(runner.model)
        for number, text in report.failed.items():
            logger.warning(
                "piece %d of %d cannot be compiled and runs as it was traced: %s",
                number,
                pieces,
                text,
            )
        runner.clock.add("pieces", time.perf_counter() - self._began)
        return forward

    def _stored(self, adapters: bool) -> Generator[bool, None, PreparedForward]:
        """Load the forward from the cache. If pieces are missing, another process compiles them
        first, once for steps of all kinds.
        """
        try:
            return (yield from self._loaded(adapters, retry=True))
        except NotStoredError:
            if self._outcome is None:
                self._outcome = yield from self._compiled()
        try:
            # Steps without adapters come first, so their pieces may be there although it failed.
            return (yield from self._loaded(adapters, retry=False))
        except NotStoredError:
            if self._outcome.reason is None:
                raise
            raise _NoPieces(self._outcome.reason, self._outcome.text) from None

    def _loaded(self, adapters: bool, *, retry: bool) -> Generator[bool, None, PreparedForward]:
        """Load the forward from the cache on all ranks. Raise on all ranks if one of them fails."""
        runner, found, failure = self._runner, None, None
        self._next_is_own = True
        yield True
        try:
            store = piece_store(PieceStore, runner.config, runner.platform)
            key = stored_key(
                runner.model,
                runner.model_config,
                runner.dtype,
                runner.linear_kinds,
                ranks=self._ranks.size,
                ep_size=runner.config.ep_size,
                adapters=adapters,
            )
            found = yield from store.load(runner.model, key, retry=retry)
        except Exception as error:
            failure = error
        self._next_is_own = False
        yield True
        state = _LOADED if failure is None else _BROKEN
        if isinstance(failure, NotStoredError):
            state = _NOT_STORED
        state = self._ranks.minimum(state)
        if state == _NOT_STORED:
            if isinstance(failure, NotStoredError):
                raise failure
            raise NotStoredError("the compile cache of another rank lacks pieces")
        if state == _BROKEN:
            raise failure or _ON_ANOTHER_RANK
        assert found is not None
        return found

    def _compiled(self) -> Generator[bool, None, Outcome]:
        """Return the outcome of the process that fills rank 0's cache.

        The first rank of every other machine starts a compiling process too.
        """
        outcome = None
        if self._ranks.rank == 0 or (self._ranks.node > 0 and self._ranks.local_rank == 0):
            self._next_is_own = True
            yield True
            outcome = self._start_compiling()
            while self._compiling is not None and (outcome := self._compiling.poll()) is None:
                yield True
            self._compiling, self._next_is_own = None, False
        yield True
        outcome = self._ranks.broadcast_object(outcome)
        assert outcome is not None
        return outcome

    def _start_compiling(self) -> Outcome | None:
        """Start the compiling process. Return an outcome only if it cannot be started."""
        runner = self._runner
        try:
            store = piece_store(PieceStore, runner.config, runner.platform)
            if (obstacle := store.compiler.obstacle()) is not None:
                return Outcome(Reason.COMPILE_FAILED, obstacle)
            rank = None if runner.adapters is None else runner.adapters.slots.rank
            self._compiling = start(
                runner.config, runner.model_config, runner.dtype, runner.linear_kinds, rank
            )
        except Exception as error:
            return Outcome(_reason(error), str(error))
        return None

    def _agreed(self, work: Iterator[bool]) -> Iterator[bool]:
        """Yield the common portions of `work`. Raise on all ranks if one of them fails."""
        while True:
            portion, failure = None, None
            try:
                portion = next(work, None)
            except Exception as error:
                failure = error
            alike = self._ranks.broadcast_object(portion) == portion
            if not self._ranks.minimum(failure is None and alike):
                raise failure or _ON_ANOTHER_RANK
            if portion is None:
                return
            yield portion

    def _log_graphs(self) -> None:
        info = self._runner.graphs.info()
        if not info.distinct_pieces and not info.num_graphs:
            return
        logger.info(
            "steps run in %d distinct pieces; %d sizes captured in %d graphs of %.0f MiB, after "
            "%.1f s",
            info.distinct_pieces,
            len(info.prefill_sizes) + len(info.decode_sizes),
            info.num_graphs,
            info.graph_bytes / 2**20,
            time.perf_counter() - self._began,
        )
        if info.passes:
            logger.info("passes over the forward: %s", describe_passes(info))


def _reason(error: Exception) -> Reason:
    """Return the reason that is reported for an error."""
    match error:
        case CaptureError():
            return Reason.WRONG_RESULT
        case torch.OutOfMemoryError() | MemoryError():
            return Reason.OUT_OF_MEMORY
        case NotStoredError() | OSError():
            return Reason.NOT_IN_CACHE
    return Reason.COMPILE_FAILED
