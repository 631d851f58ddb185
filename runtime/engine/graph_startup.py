"""Brings pieces and graphs in while the engine serves: pieces out of the cache, which another
process fills, then a capture at a time.

With several ranks each portion is one that all do at once, or one of a rank's own: how many of
those it takes, and how they end, the ranks agree on before the next common one.

Nothing here traces or compiles, nor does anything that it imports: what the cache lacks once the
other process has ended stays away.
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
from ..executor.model_runner import ModelRunner
from ..graphs.compile_process import CompileProcess, Outcome, start
from ..graphs.pieces import piece_store, stored_key
from ..graphs.prefill import PrefillGraph
from ..process.progress import progress_bar

logger = logging.getLogger(__name__)


_PATIENCE_SECONDS = 120.0
"""From the start until pieces are tried on the longest step although requests run."""


class _NoPieces(Exception):
    """Why steps do not run in pieces."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(" ".join(text.split())[:300])
        self.reason = reason


_ON_ANOTHER_RANK = _NoPieces(Reason.WRONG_RESULT, "it does not on another rank")
_LOADED, _NOT_STORED, _BROKEN = 2, 1, 0
"""How a rank came to its pieces."""


class GraphStartup:
    """Work that is done between batches, in portions; `pending` until there is none left."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._began = time.perf_counter()
        self._compiling: CompileProcess | None = None
        self._next_is_long = False
        self._ranks = runner.ranks
        graphs = runner.graphs
        self.pending = {graphs.prefill_backend, graphs.decode_backend} != {Backend.DISABLED}
        self._next_is_own = graphs.prefill_backend is Backend.PIECEWISE
        self._work = self._portions()
        if self.pending and not self._next_is_own and self._ranks.rank == 0:
            self.advance()

    def advance(self, *, busy: bool = False) -> None:
        """On rank 0, the next portion: loading a piece, a look at the compiler, a run of a piece to
        check it, or one capture.

        `busy`: requests are running; a long run waits for them to end, for a while.
        """
        if busy and self._next_is_long and time.perf_counter() < self._began + _PATIENCE_SECONDS:
            return
        self._ranks.tell("advance", self._next_is_own)
        self._next()

    def follow(self, own: bool) -> None:
        """On another rank: rank 0 does a portion, of its `own` or one that all do."""
        while self._next_is_own:
            self._next()
            if own:
                return
        if not own:
            self._next()

    def complete(self, *, progress: bool = False) -> None:
        """Do everything now (`--startup full`)."""
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
        """End the compiler, if it still runs."""
        self.pending = False
        if self._compiling is not None:
            self._compiling.stop()

    def _next(self) -> None:
        self.pending = self.pending and next(self._work, None) is not None

    def _portions(self) -> Iterator[bool]:
        """All of the work, a portion for each turn."""
        graphs = self._runner.graphs
        if graphs.prefill is not None and graphs.prefill_backend is Backend.PIECEWISE:
            forward = yield from self._pieces(graphs.prefill)
        else:
            forward = (
                BreakableForward(self._runner.model)
                if graphs.prefill_backend is Backend.BREAKABLE
                else None
            )
        try:
            graphs.use(forward)
        except Exception as error:
            if self._ranks.size > 1:
                raise
            # Buffers and plans of the graphs take memory too; without them steps stay as they are.
            logger.warning(
                "steps run eagerly: %s; --disable-cuda-graph spares the attempt",
                " ".join(str(error).split())[:300],
            )
        else:
            yield True
            while graphs.capture_next():
                yield True
        self._tell()

    def _pieces(
        self, prefill: PrefillGraph
    ) -> Generator[bool, None, PiecewiseForward | ForwardByLength | BreakableForward | None]:
        """The forward in pieces if the cache has it and it gives the model's answers; what steps
        run as without them.
        """
        runner = self._runner
        try:
            forward, report = yield from self._stored()
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

    def _stored(self) -> Generator[bool, None, PreparedForward]:
        """What the cache holds; what it lacks another process is asked for first, once."""
        try:
            return (yield from self._loaded(retry=True))
        except NotStoredError:
            outcome = yield from self._compiled()
        if outcome.reason is not None:
            raise _NoPieces(outcome.reason, outcome.text)
        return (yield from self._loaded(retry=False))

    def _loaded(self, *, retry: bool) -> Generator[bool, None, PreparedForward]:
        """What the cache holds, on every rank or on none: raises on all where it does on one."""
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
            )
            found = yield from store.load(runner.model, key, retry=retry)
        except Exception as error:
            failure = error
        self._next_is_own = False
        yield True
        state = _LOADED if failure is None else _BROKEN
        if isinstance(failure, NotStoredError):
            state = _NOT_STORED
        least = self._ranks.least(state)
        if least == _NOT_STORED:
            raise NotStoredError("the compile cache of a rank lacks pieces")
        if least == _BROKEN:
            raise failure or _ON_ANOTHER_RANK
        assert found is not None
        return found

    def _compiled(self) -> Generator[bool, None, Outcome]:
        """How the process that fills rank 0's cache has ended; the first rank of each other machine
        starts one too.
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
        told = self._ranks.told(outcome)
        assert told is not None
        return told

    def _start_compiling(self) -> Outcome | None:
        """Why it cannot be, where it cannot."""
        runner = self._runner
        try:
            store = piece_store(PieceStore, runner.config, runner.platform)
            if (obstacle := store.compiler.obstacle()) is not None:
                return Outcome(Reason.COMPILE_FAILED, obstacle)
            self._compiling = start(
                runner.config, runner.model_config, runner.dtype, runner.linear_kinds
            )
        except Exception as error:
            return Outcome(_reason(error), str(error))
        return None

    def _agreed(self, work: Iterator[bool]) -> Iterator[bool]:
        """Portions that all ranks do at once: where one of them fails, all do."""
        while True:
            portion, failure = None, None
            try:
                portion = next(work, None)
            except Exception as error:
                failure = error
            alike = self._ranks.told(portion) == portion
            if not self._ranks.least(failure is None and alike):
                raise failure or _ON_ANOTHER_RANK
            if portion is None:
                return
            yield portion

    def _tell(self) -> None:
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


def _reason(error: Exception) -> Reason:
    """Of what keeps pieces from being used that were compiled."""
    match error:
        case CaptureError():
            return Reason.WRONG_RESULT
        case torch.OutOfMemoryError() | MemoryError():
            return Reason.OUT_OF_MEMORY
        case NotStoredError() | OSError():
            return Reason.NOT_IN_CACHE
    return Reason.COMPILE_FAILED
