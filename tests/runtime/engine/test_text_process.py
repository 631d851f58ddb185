"""What the engine process tells the server of itself: figures that are true whenever it rests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from toy_runner import make_core

from piecework.runtime.distributed.ranks import ALONE
from piecework.runtime.engine import text_process
from piecework.runtime.engine.build import Engine
from piecework.runtime.engine.ipc import decode, encode
from piecework.runtime.engine.mailbox import Mailbox
from piecework.runtime.engine.messages import EngineStats, GenerateRequest, Shutdown, StepOutput
from piecework.runtime.engine.text_process import EngineProcess
from piecework.runtime.sampling.params import SamplingParams


class Client:
    """Both sockets of an engine process; each request is sent once the one before has ended."""

    def __init__(self, requests: list[GenerateRequest]) -> None:
        self._requests = list(requests)
        self._is_idle = True
        self.stats = EngineStats()

    def poll(self, patience: int | None) -> bool:
        return self._is_idle

    def recv_multipart(self) -> Any:
        self._is_idle = False
        if not self._requests:
            return encode(Shutdown())
        return encode(self._requests.pop(0))

    def send_multipart(self, frames: Any) -> None:
        message = decode(frames)
        if isinstance(message, StepOutput):
            self.stats = message.stats or self.stats
            self._is_idle = any(output.finish_reason for output in message.outputs)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("count", [1, 4])
def test_an_engine_without_work_has_told_its_last_figures(
    count: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a request came and went within one step: none was there before or after."""
    monkeypatch.setattr(text_process, "_STATS_SECONDS", 3600.0)
    core, runner = make_core(overlap=overlap)
    params = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    client = Client(
        [GenerateRequest(rid=str(n), input_ids=[n] * 5, params=params) for n in range(3)]
    )
    shell = SimpleNamespace(ranks=ALONE, rest=lambda: None, close=lambda: None)
    startup = SimpleNamespace(pending=False, stop=lambda: None)
    engine = Engine(core, cast("Any", shell), cast("Any", startup))
    EngineProcess(engine, Mailbox(client, client)).run()
    assert client.stats == core.stats()
    assert client.stats.generation_tokens_total == 3 * count and runner.step_tokens
