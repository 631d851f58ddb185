"""Errors as Anthropic has them: https://docs.anthropic.com/en/api/errors."""

from __future__ import annotations

from typing import Any

PATH = "/v1/messages"
OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    OVERLOADED: "overloaded_error",
}


def is_messages(path: str) -> bool:
    """Whether an answer to this path is to be as Anthropic's."""
    return path.startswith(PATH)


def as_anthropic(
    status: int, code: str | None, message: str, request_id: str
) -> tuple[int, dict[str, Any]]:
    """Status and JSON object of an error with OpenAI's status and code. A server that is full is
    `overloaded_error`; one whose engine does not serve stays 503, an `api_error`.
    """
    if code == "context_length_exceeded":
        # By these words clients know when to shorten a conversation.
        message = f"prompt is too long: {message}"
    if status == 503 and code != "engine_unavailable":
        status = OVERLOADED
    default = "invalid_request_error" if status < 500 else "api_error"
    error = {"type": _TYPES.get(status, default), "message": message}
    return status, {"type": "error", "error": error, "request_id": request_id}
