"""An HTTP request on its way from the ingress to a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ..core.errors import InvalidRequest
from ..http.body import check_structure

_PROMPT_CHARS = 16_384
"""How much of a prompt is compared with what replicas had before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedRequest:
    """`prompt`: the text by which Ray's prefix-aware router chooses a replica; never empty, for it
    divides by its length.
    """

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int] | None
    prompt: str


@dataclass(frozen=True, slots=True)
class ResponseStart:
    """What a replica sends before the parts of a body."""

    status: int
    headers: list[tuple[bytes, bytes]]


class _Body(msgspec.Struct):
    """The members of requests of all endpoint families that hold what the model reads first."""

    system: Any = None
    instructions: Any = None
    tools: Any = None
    messages: Any = None
    prompt: Any = None
    text: Any = None
    input: Any = None
    input_ids: Any = None


_decoder = msgspec.json.Decoder(_Body)


def routed_text(path: str, body: bytes) -> str:
    """The text that requests share whose prompts begin alike; the path where there is none, or
    where the body is one that its replica will refuse: nothing large is made of it here.
    """
    try:
        check_structure(body)
        found = _decoder.decode(body)
    except (InvalidRequest, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return path
    members = (getattr(found, name) for name in _Body.__struct_fields__)
    parts = [member for member in members if member]
    if not parts:
        return path
    return msgspec.json.encode(parts)[:_PROMPT_CHARS].decode(errors="replace")
