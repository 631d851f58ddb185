"""Errors in the format of llama.cpp's server: `{"error": {"code", "message", "type"}}`."""

from __future__ import annotations

from .answers import Answer

# Paths whose errors have this format.
PATHS = frozenset({"/completion", "/completions", "/infill", "/apply-template", "/props", "/slots"})
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "unavailable_error",
}


class LlamaCppError(Answer):
    """`code` is the HTTP status."""

    code: int
    message: str
    type: str


class LlamaCppErrorAnswer(Answer):
    """An error in the format of llama.cpp's server."""

    error: LlamaCppError


def as_llama_cpp(status: int, code: str | None, message: str) -> LlamaCppErrorAnswer:
    """Convert an error with OpenAI's status and code."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return LlamaCppErrorAnswer(LlamaCppError(status, message, kind))
