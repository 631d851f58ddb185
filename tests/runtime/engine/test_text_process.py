"""What the engine process tells the server of itself: figures that are true whenever it rests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from toy_runner import make_core

from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.messages import (
    CacheFlushed,
    EngineStats,
    FlushCache,
    Shutdown,
    StepOutput,
)
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.distributed.ranks import ALONE
from piecework.runtime.engine import text
from piecework.runtime.engine.build import Engine
from piecework.runtime.engine.core import EngineCore
from piecework.runtime.engine.loop import Loop
from piecework.runtime.engine.text import TextEngine
from piecework.runtime.process.heartbeat import BEAT_MS
from piecework.runtime.process.ipc import decode, encode
from piecework.runtime.process.mailbox import Mailbox


class Client:
    """The other end of an engine process; each message is sent once the one before is answered."""

    def __init__(self, messages: Sequence[GenerateRequest | FlushCache]) -> None:
        self._messages = list(messages)
        self._is_idle = True
        self.stats = EngineStats()

    def poll(self, patience: int | None) -> bool:
        return self._is_idle

    def receive(self) -> Any:
        self._is_idle = False
        if not self._messages:
            return encode(Shutdown())
        return encode(self._messages.pop(0))

    def send(self, frames: Any) -> bool:
        message = decode(frames)
        if isinstance(message, StepOutput):
            self.stats = message.stats or self.stats
            self._is_idle = any(output.finish_reason for output in message.outputs)
        elif isinstance(message, CacheFlushed):
            self._is_idle = True
        return True


def serve(core: EngineCore, messages: Sequence[GenerateRequest | FlushCache]) -> EngineStats:
    """What the client was told last."""
    client = Client(messages)
    run(core, client)
    return client.stats


def run(
    core: EngineCore, client: Client, give_back_memory: Callable[[], None] = lambda: None
) -> None:
    shell = SimpleNamespace(
        ranks=ALONE,
        rest=lambda: None,
        give_back_memory=give_back_memory,
        close=lambda: None,
        adapters=None,
        images=None,
        config=SimpleNamespace(model_path=""),
    )
    startup = SimpleNamespace(pending=False, stop=lambda: None)
    engine = Engine(core, cast("Any", shell), cast("Any", startup))
    Loop(TextEngine(engine), Mailbox(cast("Any", client))).run()


def asked(rid: str, count: int) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    return GenerateRequest(rid=rid, input_ids=[7] * 9, params=params)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("count", [1, 4])
def test_an_engine_without_work_has_told_its_last_figures(
    count: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a request came and went within one step: none was there before or after."""
    monkeypatch.setattr(text, "_STATS_SECONDS", 3600.0)
    core, _ = make_core(overlap=overlap)
    told = serve(core, [asked(str(n), count) for n in range(3)])
    assert told == core.stats() and told.generation_tokens_total == 3 * count


def test_a_cache_that_was_flushed_is_told_to_be_empty() -> None:
    core, _ = make_core()
    assert serve(core, [asked("r", 3)]).kv_tokens_cached > 0
    assert serve(core, [asked("s", 3), FlushCache()]).kv_tokens_cached == 0


def test_memory_is_given_back_once_in_a_while_without_requests() -> None:
    given: list[int] = []
    polls: list[int] = []

    class Late(Client):
        """Asks nothing for five seconds after each answer, and then at once."""

        def poll(self, patience: int | None) -> bool:
            if patience == BEAT_MS:
                polls.append(patience)
                return len(polls) % 6 == 0
            return super().poll(patience)

    core, _ = make_core()
    run(core, Late([asked("r", 3), asked("s", 3)]), lambda: given.append(len(polls)))
    assert given == [1, 7, 13]


def test_garbage_is_looked_for_again_once_imports_are_done_or_have_failed() -> None:
    """In a process of its own: an engine's process takes signals over."""
    code = (
        "import gc, sys\n"
        "from piecework.runtime.engine.process import run_engine\n"
        "def find():\n"
        "    assert not gc.isenabled() and 'torch' not in sys.modules\n"
        "    raise LookupError\n"
        "try:\n"
        "    run_engine(find)\n"
        "except LookupError:\n"
        "    print(gc.isenabled())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("True\n", "")
