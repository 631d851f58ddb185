"""Brings pieces and graphs in while the engine serves: compile in another process, load, then capture a size at a time."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from ..compilation.piecewise import PiecewiseForward
from ..compilation.whole import BreakableForward
from .compile_process import start
from .config import Backend
from .model_runner import ModelRunner
from .pieces import install, installer, load

logger = logging.getLogger(__name__)


class GraphStartup:
    """Work that is done between batches, in portions; `pending` until there is none left."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._began = time.perf_counter()
        self._compiling: subprocess.Popen[bytes] | None = None
        graphs = runner.graphs
        self.pending = {graphs.prefill_backend, graphs.decode_backend} != {Backend.DISABLED}
        self._begun = graphs.prefill_backend is not Backend.PIECEWISE
        if self.pending and self._begun:
            self._use(BreakableForward(runner.model) if graphs.prefill_backend is Backend.BREAKABLE else None)

    def advance(self) -> None:
        """The next portion: loading the pieces, from a compiler where the cache lacks one, or a look at it, or one capture."""
        if not self._begun:
            self._begin()
        elif self._compiling is not None:
            code = self._compiling.poll()
            if code is not None:
                self._compiling = None
                self._use(self._checked(lambda: self._compiled(code)))
        elif self.pending and not self._runner.graphs.capture_next():
            self._finish()

    def complete(self, *, progress: bool = False) -> None:
        """Do everything now (`--startup full`)."""
        if not self._begun:
            self._begin()
        if self._compiling is not None:
            self._compiling.wait()
            self.advance()
        sizes = self._runner.graphs.num_pending
        with tqdm(
            total=sizes, desc="capturing graphs", unit=" sizes", file=sys.stderr, leave=False, disable=not progress or not sizes
        ) as bar:
            while self.pending:
                self.advance()
                bar.update(sizes - self._runner.graphs.num_pending - bar.n)

    def stop(self) -> None:
        """End the compiler, if it still runs."""
        self.pending = False
        if self._compiling is not None:
            self._compiling.terminate()
            self._compiling.wait()

    def _begin(self) -> None:
        self._begun = True
        runner = self._runner
        try:
            stored = load(installer(runner.config, runner.platform), runner.model, runner.model_config, runner.dtype, runner.linear_kinds)
        except Exception:
            stored = None  # The compiler meets the same, and its exit code is told.
        if stored is None:
            self._compiling = start(runner.config, runner.model_config, runner.dtype, runner.linear_kinds)
        else:
            self._use(self._checked(lambda: stored))

    def _compiled(self, code: int) -> PiecewiseForward:
        """The pieces that the compiler has put into the cache."""
        if code != 0:
            raise RuntimeError(f"the compiling process ended with exit code {code}")
        runner = self._runner
        found = installer(runner.config, runner.platform)
        return install(found, runner.model, runner.model_config, runner.dtype, runner.linear_kinds)[0]

    def _checked(self, find: Callable[[], PiecewiseForward]) -> PiecewiseForward | BreakableForward | None:
        """The pieces if they give the model's answers; what steps run as without them."""
        runner = self._runner
        try:
            forward = find()
            runner.graphs.check(forward)
            return forward
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
        if runner.platform.graphs_are_real:
            logger.warning("the model cannot run in pieces (%s); it is recorded as it runs: --cuda-graph-backend-prefill breakable", reason)
            return BreakableForward(runner.model)
        logger.warning("steps run eagerly: the model cannot run in pieces (%s); --disable-piecewise-cuda-graph spares the attempt", reason)
        return None

    def _use(self, forward: PiecewiseForward | BreakableForward | None) -> None:
        if isinstance(forward, PiecewiseForward):
            self._runner.clock.add("pieces", time.perf_counter() - self._began)
        try:
            self._runner.graphs.use(forward)
        except Exception as error:
            # Buffers and plans of the graphs take memory too; without them steps stay as they are.
            logger.warning("steps run eagerly: %s; --disable-cuda-graph spares the attempt", " ".join(str(error).split())[:300])
            self._finish()

    def _finish(self) -> None:
        self.pending = False
        info = self._runner.graphs.info()
        if not info.distinct_pieces and not info.num_graphs:
            return
        seconds = time.perf_counter() - self._began
        logger.info(
            "steps run in %d distinct pieces; %d sizes captured in %d graphs of %.0f MiB, after %.1f s",
            info.distinct_pieces,
            len(info.prefill_sizes) + len(info.decode_sizes),
            info.num_graphs,
            info.graph_bytes / 2**20,
            seconds,
        )
