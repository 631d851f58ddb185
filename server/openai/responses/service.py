"""Stored responses, and background responses, which run without a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import msgspec

from ...config.mcp_allow import parse_mcp_allow
from ...core.errors import InvalidRequest, NotFound, Unavailable, as_api_error
from ...serving.collector import Collector
from ...serving.sse import KeepAlive
from ...serving.state import Serving
from ..stored.kept import CLOSE_SECONDS, Kept
from .conversation_store import ConversationStore
from .items import Item
from .job import MAX_EVENT_BYTES, Job
from .live import LiveResponse
from .requests import ResponsesRequest
from .store import ResponseStore, Stored
from .stream import ResponseEvents

P = ParamSpec("P")
T = TypeVar("T")
# Limit for running background responses: their input and the maximum size of their streams.
_MAX_BACKGROUND_BYTES = 128 * 2**20
_FOLLOWED_SECONDS = 60  # Time during which a stream can be read after its end.
# Number of ended background responses that stay in memory because they could not be written.
_MAX_ENDED = 64
# States of a response whose items are added to its conversation.
_ADDED = ("completed", "incomplete")


class Responses:
    """The responses of a server.

    Attributes:
        keeps: Whether responses are stored.
        mcp_allowed: MCP servers that responses may use.
        conversations: The stored conversations. Use them by `ask`.
        keep_alive: What a silent stream of a background response sends.
    """

    def __init__(self, serving: Serving, kept: Kept) -> None:
        self.keeps = kept.is_on
        self.keep_alive = KeepAlive(serving.config.sse_ping_interval)
        self.conversations = ConversationStore(kept.database)
        self._store = ResponseStore(kept.database)
        self._kept = kept
        self._serving = serving
        self.mcp_allowed = parse_mcp_allow(serving.config.mcp_allow)
        self._is_closed = False
        self._jobs: dict[str, Job] = {}

    def check(self, body: ResponsesRequest) -> None:
        """Raise `InvalidRequest` if the request needs stored responses and the server stores
        none.
        """
        needs = {
            "previous_response_id": body.previous_response_id is not None,
            "conversation": body.conversation is not None,
            "background": body.background,
            "input": any(item.kind == "item_reference" for item in body.input),
        }
        for param, is_needed in needs.items():
            if is_needed:
                self._kept.require(param)

    async def context(
        self, body: ResponsesRequest, own: list[Item]
    ) -> tuple[list[Item], list[Item]]:
        """Return the response's own input, and all items up to it. Raise `InvalidRequest`.

        References in the input are replaced by the items that they name.
        """
        earlier: list[Item] = []
        if body.conversation is not None:
            earlier = await self._conversation(body.conversation)
        elif body.previous_response_id is not None:
            earlier = await self._history(body.previous_response_id)
        own = await self.resolved(own, {item["id"]: item for item in earlier})
        return own, [*earlier, *own]

    async def resolved(
        self, own: list[Item], known: Mapping[str, Item] = MappingProxyType({})
    ) -> list[Item]:
        """Replace references by the items that they name, from `known` or stored responses.

        Raise `NotFound` or `InvalidRequest`.
        """
        references = [item["id"] for item in own if item["type"] == "item_reference"]
        if not references:
            return own
        found = {**await self.ask(self._store.items, references), **known}
        missing = [item_id for item_id in references if item_id not in found]
        if missing:
            raise NotFound(
                f"input: the item {missing[0]!r:.100} is not stored; send the item itself.",
                param="input",
                code="item_not_found",
            )
        if len(references) > len(set(references)):
            # A small body would become a large conversation.
            raise InvalidRequest(
                "input: an item_reference stands there twice; send the item itself.",
                param="input",
                code="duplicate_item_reference",
            )
        return [found[item["id"]] if item["type"] == "item_reference" else item for item in own]

    async def ask(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a method of the stores. Raise `InvalidRequest` if there are none."""
        self._kept.require()
        return await self._kept.ask(work, *args, **kwargs)

    async def find(self, response_id: str) -> Stored:
        """Return a stored or running response. Raise `NotFound`."""
        if (job := self._jobs.get(response_id)) is not None:
            return Stored(_decoded(job.answer), job.items)
        stored = await self._kept.ask(self._store.get, response_id) if self.keeps else None
        if stored is None:
            raise _not_found(response_id)
        return stored

    async def input_items(self, response_id: str) -> list[Item]:
        """Return all input items of a response, those of previous turns included. Raise
        `NotFound`.
        """
        stored = await self.find(response_id)
        previous = stored.response["previous_response_id"]
        return [*(await self._history(previous) if previous is not None else ()), *stored.items]

    async def delete(self, response_id: str) -> None:
        """Delete a response. Raise `NotFound`."""
        job = self._jobs.get(response_id)
        if job is not None:
            await self._stop(job)
            self._jobs.pop(response_id, None)
        gone = self.keeps and await self._kept.ask(self._store.delete, response_id)
        if not gone and job is None:
            raise _not_found(response_id)

    def keep(self, answer: LiveResponse, items: list[Item]) -> None:
        """Write a response in the store's thread. Later calls of `find` will find it.

        If the response has ended, its items are added to its conversation.
        """
        if self._is_closed:
            return
        shown = answer.as_answer()
        if answer.is_stored:
            put = partial(self._store.put, shown, items)
            self._kept.put(answer.size, put, partial(self._was_put, answer))
        if answer.conversation is not None and answer.status in _ADDED:
            added = [*items, *msgspec.to_builtins(shown.output)]
            add = partial(self.conversations.add, answer.conversation, added)
            self._kept.put(answer.size, add)

    def start(
        self, answer: LiveResponse, items: list[Item], collector: Collector, stream: bool
    ) -> Job:
        """Generate the response, even if its client disconnects.

        Raise `Unavailable`, and the engine's error if it takes no request.
        """
        self.check_jobs(answer.size, stream)
        collector.__enter__()
        events = ResponseEvents(answer) if stream else None
        return self.start_job(Job(answer, items, collector, events))

    def check_jobs(self, size: int, stream: bool) -> None:
        """Raise `Unavailable` if there is no room for a job with a request of `size` bytes."""
        under_way = sum(job.weight for job in self._jobs.values())
        if under_way + size + stream * MAX_EVENT_BYTES > _MAX_BACKGROUND_BYTES:
            raise Unavailable(
                f"Background responses of {_MAX_BACKGROUND_BYTES} bytes are under way. Try again "
                "in 5 s.",
                code="background_full",
                headers={"Retry-After": "5"},
            )

    def start_job(self, job: Job) -> Job:
        """Run a job."""
        answer, items = job.answer, job.items
        self._jobs[answer.id] = job
        if not job.ends_with_client:
            self.keep(answer, items)
        job.task = asyncio.create_task(job.run())
        job.task.add_done_callback(partial(self._ended, job))
        return job

    async def followed(self, response_id: str) -> Job:
        """Return a job with events to read. Raise `NotFound` or `InvalidRequest`."""
        job = self._jobs.get(response_id)
        if job is None or not job.is_streamed:
            status = (await self.find(response_id)).response["status"]
            raise InvalidRequest(
                f"stream: the response {response_id!r:.100} is {status} and has no stream (any "
                "more); leave out stream.",
                param="stream",
                code="not_streamed",
            )
        return job

    async def cancel(self, response_id: str) -> dict[str, Any]:
        """Cancel a response and return it. Raise `NotFound` or `InvalidRequest`."""
        job = self._jobs.get(response_id)
        if job is not None:
            await self._stop(job)
            return _decoded(job.answer)
        response = (await self.find(response_id)).response
        if not response["background"]:
            raise InvalidRequest(
                f"The response {response_id!r:.100} has no background true; a stream ends "
                "when its client closes the connection.",
                param="response_id",
                code="not_in_background",
            )
        return response

    async def close(self) -> None:
        """Wait for background responses when the server stops. Later ones are not stored."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        self._is_closed = True

    async def _conversation(self, conversation_id: str) -> list[Item]:
        if any(
            job.goes_on and job.answer.conversation == conversation_id
            for job in self._jobs.values()
        ):
            raise InvalidRequest(
                f"A background response of the conversation {conversation_id!r:.100} is still "
                "being made; wait until it is completed.",
                param="conversation",
                code="conversation_locked",
            )
        return await self._kept.ask(self.conversations.items, conversation_id, "conversation")

    async def _history(self, response_id: str) -> list[Item]:
        if (job := self._jobs.get(response_id)) is not None and job.goes_on:
            raise InvalidRequest(
                f"The previous response {response_id!r:.100} is still being made; wait until it "
                "is completed.",
                param="previous_response_id",
                code="previous_response_not_completed",
            )
        return await self._kept.ask(self._store.history, response_id)

    async def _stop(self, job: Job) -> None:
        if job.task is not None and not job.task.done():
            job.task.cancel()
            await asyncio.wait([job.task])
            # The task's callbacks run in the next iteration of the event loop.
            await asyncio.sleep(0)

    def _ended(self, job: Job, task: asyncio.Task[None]) -> None:
        if job.collector is not None:
            job.collector.__exit__(None, None, None)
        if task.cancelled():
            job.answer.cancel()
        elif (error := task.exception()) is not None and isinstance(error, Exception):
            known = as_api_error(error)
            self._serving.metrics.count_error(known.type)
            job.answer.fail(known)
        job.end()
        if job.answer.id not in self._jobs:
            return
        if not (job.ends_with_client and task.cancelled()):
            self.keep(job.answer, job.items)
        if job.ends_with_client:
            del self._jobs[job.answer.id]

    def _was_put(self, answer: LiveResponse, error: BaseException | None) -> None:
        later = asyncio.get_running_loop().call_later
        job = self._jobs.get(answer.id)
        if job is not None and not job.goes_on:
            later(_FOLLOWED_SECONDS, job.forget)
        if error is not None:
            ended = [job.answer.id for job in self._jobs.values() if not job.goes_on]
            for response_id in ended[:-_MAX_ENDED]:
                del self._jobs[response_id]
        elif job is not None and not job.goes_on:
            # Keep the job as long as its end may be read.
            later(_FOLLOWED_SECONDS if job.events else 0, self._jobs.pop, answer.id, None)


def _decoded(answer: LiveResponse) -> dict[str, Any]:
    """Return a response as the store returns it."""
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(answer.as_answer()))
    return decoded


def _not_found(response_id: str) -> NotFound:
    return NotFound(
        f"There is no stored response {response_id!r:.100}.",
        param="response_id",
        code="response_not_found",
    )
