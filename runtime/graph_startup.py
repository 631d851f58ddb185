"""Brings pieces and graphs in while the engine serves: compile in another process, load, then capture a size at a time."""

from __future__ import annotations

import logging
import subprocess
import time

from .compile_process import start
from .model_runner import ModelRunner
from .prefill_graph import install, installer

logger = logging.getLogger(__name__)


class GraphStartup:
    """Work that is done between batches, in portions; `pending` until there is none left."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._began = time.perf_counter()
        self._compiling: subprocess.Popen[bytes] | None = None
        self.pending = runner.graph is not None
        if self.pending:
            self._compiling = start(runner.config, runner.model_config, runner.dtype)

    def advance(self) -> None:
        """The next portion: a look at the compiler, or loading the pieces, or one capture."""
        if self._compiling is not None:
            code = self._compiling.poll()
            if code is not None:
                self._compiling = None
                self._load(code)
        elif self.pending and self._runner.graph is not None and not self._runner.graph.capture_next():
            self._finish()

    def complete(self) -> None:
        """Do everything now (`--startup full`)."""
        if self._compiling is not None:
            self._compiling.wait()
        while self.pending:
            self.advance()

    def stop(self) -> None:
        """End the compiler, if it still runs."""
        self.pending = False
        if self._compiling is not None:
            self._compiling.terminate()
            self._compiling.wait()

    def _load(self, code: int) -> None:
        runner = self._runner
        assert runner.graph is not None
        if code != 0:
            self._give_up(f"the compiling process ended with exit code {code}")
            return
        try:
            runner.graph.use(install(installer(runner.config, runner.platform), runner.model, runner.model_config, runner.dtype))
        except Exception as error:
            self._give_up(" ".join(str(error).split())[:300])

    def _give_up(self, reason: str) -> None:
        self.pending = False
        logger.warning("steps run eagerly: the model cannot run in pieces (%s); --disable-piecewise-cuda-graph spares the attempt", reason)

    def _finish(self) -> None:
        self.pending = False
        graph = self._runner.graph
        assert graph is not None
        sizes = graph.graphs.captured if graph.graphs is not None else []
        seconds = time.perf_counter() - self._began
        logger.info("steps run in %d distinct pieces, %d sizes captured, after %.1f s", graph.num_pieces, len(sizes), seconds)
