"""The requests and the KV cache that a server reports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ...bench.client import Client, RequestFailed

_POLL_SECONDS = 0.2
# Names of Piecework and SGLang, then of vLLM, each after a prefix and a colon.
_METRIC_NAMES = {
    "running": ("num_running_reqs", "num_requests_running"),
    "queued": ("num_queue_reqs", "num_requests_waiting"),
    "kv_tokens_held": ("num_used_tokens",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """Running and waiting requests, and tokens of the KV cache that requests hold, without cached
    prefixes. None: not reported.
    """

    running: int
    queued: int
    kv_tokens_held: int | None = None

    @property
    def idle(self) -> bool:
        return self.running == 0 and self.queued == 0 and not self.kv_tokens_held

    def line(self) -> str:
        held = "unknown" if self.kv_tokens_held is None else self.kv_tokens_held
        return f"{self.running} running, {self.queued} queued, KV tokens held by requests: {held}"


async def read_state(client: Client) -> ServerState | None:
    """Read the state from `/server_info`, or else from `/metrics`. Return None if the server has
    neither.

    Raises `RequestFailed`.
    """
    with _unless_missing():
        info = await client.get_json("/server_info")
        state = _from_info(info)
        if state is not None:
            return state
    with _unless_missing():
        return _from_metrics((await client.get("/metrics")).decode())
    return None


async def wait_idle(client: Client, seconds: float) -> ServerState | None:
    """Return the server's state once it is idle, or the last state after `seconds` of polling.

    Time in which the machine is suspended does not count. Raises `RequestFailed`.
    """
    state = await read_state(client)
    for _ in range(round(seconds / _POLL_SECONDS)):
        if state is None or state.idle:
            break
        await asyncio.sleep(_POLL_SECONDS)
        state = await read_state(client)
    return state


@contextlib.contextmanager
def _unless_missing() -> Iterator[None]:
    try:
        yield
    except RequestFailed as error:
        if error.status != 404:
            raise


def _from_info(info: Any) -> ServerState | None:
    states = info.get("internal_states") if isinstance(info, dict) else None
    if not states or "running_requests" not in states[0]:
        return None
    total = {
        name: sum(state[name] for state in states)
        for name in ("running_requests", "queued_requests", "kv_tokens_used")
    }
    return ServerState(
        running=total["running_requests"],
        queued=total["queued_requests"],
        kv_tokens_held=total["kv_tokens_used"],
    )


def _from_metrics(text: str) -> ServerState | None:
    values: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        for meaning, names in _METRIC_NAMES.items():
            if family.name.rpartition(":")[2] in names:
                values[meaning] = values.get(meaning, 0) + round(
                    sum(sample.value for sample in family.samples)
                )
    if "running" not in values or "queued" not in values:
        return None
    return ServerState(
        running=values["running"],
        queued=values["queued"],
        kv_tokens_held=values.get("kv_tokens_held"),
    )
