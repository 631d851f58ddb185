"""OpenAI's completions over the engine of another project, for comparisons alone.

It takes greedy requests with text or token ids, and answers when an answer is complete.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from aiohttp import web


class Call(NamedTuple):
    """A request: a prompt, the number of tokens to make, and the future of these tokens."""

    ids: list[int]
    most: int
    done: asyncio.Future[list[int]]

    def finish(self, made: list[int]) -> None:
        """Answer. May be called from any thread."""
        self.done.get_loop().call_soon_threadsafe(self.done.set_result, made)


class Engine(ABC):
    """An engine, and the thread that runs its steps while there are requests."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._waiting: list[Call] = []
        threading.Thread(target=self._run, daemon=True).start()

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def add(self, call: Call) -> None:
        """Take a request."""

    @abstractmethod
    def step(self) -> bool:
        """Run a step, and answer the requests that it ends. Return whether there are others."""

    async def generate(self, ids: list[int], most: int) -> list[int]:
        call = Call(ids, most, asyncio.get_running_loop().create_future())
        with self._arrived:
            self._waiting.append(call)
            self._arrived.notify()
        return await call.done

    def _run(self) -> None:
        is_busy = False
        while True:
            with self._arrived:
                while not self._waiting and not is_busy:
                    self._arrived.wait()
                arrived, self._waiting = self._waiting, []
            for call in arrived:
                self.add(call)
            is_busy = self.step()


def serve(engine: Engine, port: int) -> None:
    """Serve until the process is ended."""

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["prompt"]
        ids = engine.encode(prompt) if isinstance(prompt, str) else prompt
        made = await engine.generate(ids, body["max_tokens"])
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": len(made),
            "total_tokens": len(ids) + len(made),
        }
        choice = {"index": 0, "text": str(made), "finish_reason": "length", "logprobs": None}
        return web.json_response({"id": "0", "choices": [choice], "usage": usage})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "other"}]})

    made: Any = web.Application()
    made.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models)])
    web.run_app(made, host="127.0.0.1", port=port, print=None)
