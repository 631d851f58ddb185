"""An engine client whose engine is in the same process: the real core over a toy model, the real
messages, and a test that says when they arrive.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from scripted_engine import INFO
from toy_runner import assert_idle, make_core
from toy_tokenizer import toy_tokenizer

from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.messages import ToEngine
from piecework.runtime.distributed.ranks import ALONE
from piecework.runtime.engine.build import Engine
from piecework.runtime.engine.loop import Loop
from piecework.runtime.engine.text import TextEngine
from piecework.runtime.process.ipc import decode, encode
from piecework.runtime.process.mailbox import Mailbox
from piecework.server.engine.client import EngineClient
from piecework.server.engine.state import EngineState


class EngineInProcess(EngineClient):
    """`step` has the engine take its messages and compute a step; `deliver` brings what it said."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(model_path="toy"), toy_tokenizer())
        self.state, self.info = EngineState.READY, INFO
        self._life = cast(Any, SimpleNamespace(send=self._to_engine, pid=None))
        self._inbox: list[list[bytes]] = []
        self._outbox: list[list[bytes]] = []
        self.core, runner = make_core(num_pages=64, max_running_requests=3)
        runner.vocab_size = INFO.vocab_size
        shell = SimpleNamespace(
            ranks=ALONE,
            rest=lambda: None,
            give_back_memory=lambda: None,
            close=lambda: None,
            adapters=None,
            images=None,
            config=SimpleNamespace(model_path=""),
        )
        startup = SimpleNamespace(pending=False)
        socket = cast(Any, SimpleNamespace(send=self._to_server))
        engine = Engine(self.core, cast(Any, shell), cast(Any, startup))
        self._engine = TextEngine(engine)
        self._loop = Loop(self._engine, Mailbox(socket))

    def _to_engine(self, message: ToEngine) -> None:
        self._inbox.append(encode(message))

    def _to_server(self, frames: list[bytes]) -> bool:
        self._outbox.append(frames)
        return True

    def step(self) -> None:
        taken, self._inbox[:] = list(self._inbox), []
        for frames in taken:
            self._loop.handle(decode(frames))
        self._loop._send(self._engine.step())
        self.core.check()

    def deliver(self) -> None:
        taken, self._outbox[:] = list(self._outbox), []
        for frames in taken:
            self._receive(frames)

    def assert_nothing_left(self) -> None:
        """Once all messages have arrived; the engine has ended what nobody waits for by itself."""
        assert self.num_unfinished == 0 and self._idle.is_set()
        self.step()
        self.deliver()
        assert_idle(self.core)
        stats = self.stats
        assert (stats.running_requests, stats.queued_requests, stats.kv_tokens_used) == (0, 0, 0)
