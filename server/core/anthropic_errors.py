"""Errors in Anthropic's format: https://docs.anthropic.com/en/api/errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import UNSET, UnsetType

from .answers import Answer

VERSION_HEADER = "anthropic-version"  # Anthropic's clients send it with every request.
PATH = "/v1/messages"
_SHARED_PATH = "/v1/models"  # A header decides between OpenAI's and Anthropic's format.
OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}


class MessagesError(Answer):
    """The last two members are those of `ErrorDetail`."""

    type: str
    message: str
    retry_after: int | UnsetType = UNSET
    phase: str | UnsetType = UNSET


class MessagesErrorAnswer(Answer, kw_only=True):
    """An error in Anthropic's format."""

    type: Literal["error"] = "error"
    error: MessagesError
    request_id: str


def is_messages(path: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> bool:
    """Return whether a request with this path and headers gets Anthropic's format."""
    return path.startswith(PATH) or (
        path.startswith(_SHARED_PATH) and VERSION_HEADER.encode() in dict(headers)
    )


def as_anthropic(
    status: int,
    code: str | None,
    message: str,
    request_id: str,
    retry_after: int | UnsetType = UNSET,
    phase: str | UnsetType = UNSET,
) -> tuple[int, MessagesErrorAnswer]:
    """Convert an error with OpenAI's status and code to Anthropic's status and answer.

    A full server becomes `overloaded_error`. An engine that does not serve stays 503 `api_error`.
    """
    if code == "context_length_exceeded":
        # Clients recognize these words and shorten the conversation.
        message = f"prompt is too long: {message}"
    if status == 503 and code != "engine_unavailable":
        status = OVERLOADED
    default = "invalid_request_error" if status < 500 else "api_error"
    error = MessagesError(_TYPES.get(status, default), message, retry_after, phase)
    return status, MessagesErrorAnswer(error=error, request_id=request_id)
