"""An HTTP request on its way from the ingress to a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ..core.errors import InvalidRequest
from ..http.body import check_structure

_PROMPT_CHARS = 16_384  # Length of the text by which a replica is chosen.


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedRequest:
    """A request on its way to a replica.

    Ray's prefix-aware router chooses the replica by `prompt`, which is never empty because the
    router divides by its length.
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
    """The first part of an answer, before the parts of its body."""

    status: int
    headers: list[tuple[bytes, bytes]]


class _Body(msgspec.Struct):
    """The fields of requests that the model reads first, of all endpoint families."""

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
    """Return a text that has a common prefix for requests with a common prefix of their prompts.

    It is the path if the body has no prompt, or if the replica will refuse the body.
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
