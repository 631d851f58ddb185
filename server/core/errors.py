"""The errors of the server in OpenAI's format, or in that of another endpoint family.

OpenAI's format is `{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from ..engine.state import EngineUnavailable, QueueFull
from .answers import ErrorAnswer, ErrorDetail
from .anthropic_errors import MessagesErrorAnswer, as_anthropic, is_messages
from .llama_cpp_errors import PATHS, LlamaCppErrorAnswer, as_llama_cpp
from .ollama_errors import OllamaErrorAnswer, is_ollama

# Keys of a request's scope.
ERROR = "piecework.error"  # The `ApiError` that answers the request.
MODEL = "piecework.model"  # The model of the server that refused the request.
REQUEST_ID = "piecework.request_id"  # `X-Request-Id` of the answer.
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_TOO_MANY = "too_many_sequences"
ENGINE_RETRY_SECONDS = 5  # `Retry-After` while the engine does not serve.


class ApiError(Exception):
    """An error that is sent to the client. `param` names the invalid parameter.

    ApiError
    ├── InvalidRequest          400  errors of the client
    │   ├── Unauthorized        401
    │   ├── Forbidden           403
    │   ├── NotFound            404
    │   ├── MethodNotAllowed    405
    │   ├── RequestTimeout      408
    │   ├── BodyTooLarge        413
    │   ├── UrlTooLong          414
    │   ├── UnsupportedMedia    415
    │   ├── TooManyRequests     429  with Retry-After
    │   └── HeadersTooLarge     431
    ├── ClientGone              499  the client has left
    ├── InternalError           500
    ├── NotImplementedHere      501  an endpoint that this server does not offer
    └── Unavailable             503  with Retry-After

    A subclass sets `status` and `type`.
    """

    status = 500
    type = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: str | None = None,
        phase: str | UnsetType = UNSET,
    ) -> None:
        """`reason` replaces the message in the log if the message quotes a user's text. `phase`
        says what an engine does that does not serve yet.
        """
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.phase = phase

    def answer(self) -> ErrorAnswer:
        """Return the answer in OpenAI's format."""
        detail = self.message, self.type, self.param, self.code
        return ErrorAnswer(ErrorDetail(*detail, self._retry_after, self.phase))

    @property
    def _retry_after(self) -> int | UnsetType:
        seconds = self.headers.get("Retry-After") if self.status == Unavailable.status else None
        return UNSET if seconds is None else int(seconds)

    def answer_for(
        self, path: str, request_id: str, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> tuple[int, ErrorAnswer | MessagesErrorAnswer | LlamaCppErrorAnswer | OllamaErrorAnswer]:
        """Return status and answer in the format for the request's path and headers."""
        if is_ollama(path):
            return self.status, OllamaErrorAnswer(self.message)
        if is_messages(path, headers):
            more = self._retry_after, self.phase
            return as_anthropic(self.status, self.code, self.message, request_id, *more)
        if path in PATHS:
            return self.status, as_llama_cpp(self.status, self.code, self.message)
        return self.status, self.answer()

    def response(self, scope: Scope) -> Response:
        """Return the answer to the request of this scope."""
        scope[ERROR] = self
        status, answer = self.answer_for(scope["path"], scope.get(REQUEST_ID, ""), scope["headers"])
        return Response(msgspec.json.encode(answer), status, self.headers, "application/json")


class InvalidRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(InvalidRequest):
    status = 401


class Forbidden(InvalidRequest):
    status = 403


class NotFound(InvalidRequest):
    status = 404


class MethodNotAllowed(InvalidRequest):
    status = 405


class RequestTimeout(InvalidRequest):
    status = 408


class BodyTooLarge(InvalidRequest):
    status = 413


class UrlTooLong(InvalidRequest):
    status = 414


class UnsupportedMedia(InvalidRequest):
    status = 415


class TooManyRequests(InvalidRequest):
    status = 429
    type = "rate_limit_error"


class HeadersTooLarge(InvalidRequest):
    status = 431


class ClientGone(ApiError):
    status = 499
    type = "client_closed_request"


class InternalError(ApiError):
    pass


class NotImplementedHere(ApiError):
    status = 501
    type = "not_implemented"


class Unavailable(ApiError):
    status = 503
    type = "service_unavailable"


def as_api_error(error: Exception) -> ApiError:
    """Convert an exception to an error. Unexpected exceptions give an `InternalError` without
    details.
    """
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return from_validation(error.errors())
        case QueueFull():
            message = f"The queue is full: {error}. Try again in {error.retry_after} s."
            return Unavailable(
                message, code="queue_full", headers={"Retry-After": str(error.retry_after)}
            )
        case EngineUnavailable():
            message = f"No request can be served now: {error}."
            seconds = ENGINE_RETRY_SECONDS
            phase: str | UnsetType = UNSET
            if error.progress is not None:
                phase, seconds = error.progress
            headers = {"Retry-After": str(seconds)}
            return Unavailable(message, code="engine_unavailable", headers=headers, phase=phase)
        case HTTPException(status_code=404):
            return NotFound("No such path.", headers=error.headers)
        case HTTPException(status_code=405):
            return MethodNotAllowed(
                "This path does not take this method; the Allow header says which it takes.",
                headers=error.headers,
            )
        case HTTPException() if error.status_code < 500:
            return InvalidRequest(f"Bad request: {error.detail}.", headers=error.headers)
    return InternalError("Internal error; the server's log has the details.", code="internal_error")


UNION_TAG = "union:"  # Prefix of the tags of unions of wire models.


def from_validation(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """Convert the first of pydantic's validation errors. The message names the parameter."""
    first = errors[0]
    param = parameter_path(first["loc"]) or first.get("ctx", {}).get("param")
    message = first["msg"][0].lower() + first["msg"][1:]
    if first["type"] == "missing":
        return InvalidRequest(
            f"{param or 'body'}: this parameter is required.",
            param=param,
            code="missing_required_parameter",
        )
    got = first.get("input")
    shown = f", got {got!r:.60}" if isinstance(got, str | int | float) else ""
    code = _TOO_MANY if first["type"] == _TOO_MANY else "invalid_value"
    reason = f"{param or 'the request body'}: {message}"
    return InvalidRequest(f"{reason}{shown}.", param=param, code=code, reason=f"{reason}.")


def parameter_path(location: Sequence[str | int]) -> str | None:
    """Convert pydantic's location: ("body", "messages", 0, "role") gives "messages[0].role".

    Return None for the body itself. Tags of unions are left out.
    """
    path = ""
    # The first part is the origin. Later, "query" is the name of a member.
    for part in location[tuple(location[:1]) in (("body",), ("query",)) :]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(UNION_TAG):
            path += f".{part}" if path else part
    return path or None


async def answer_error(request: Request, error: Exception) -> Response:
    """Count and answer an error. This is the exception handler of the application."""
    known = as_api_error(error)
    if isinstance(error, HTTPException) and isinstance(known, NotFound):
        known.message = (
            f"No such path: {request.url.path:.200}. "
            f"{request.app.state.serving.purpose}; /docs lists all."
        )
    if isinstance(known, MethodNotAllowed):
        known.headers["Allow"] = ", ".join(_methods_of(request))
    serving = request.app.state.serving
    request.scope[MODEL] = serving.model_name
    serving.metrics.count_error(known.type)
    return known.response(request.scope)


def _methods_of(request: Request) -> list[str]:
    """Return all methods of the request's path. Each may have a route of its own."""
    taken = [
        method
        for method in _METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in request.app.routes
        )
    ]
    return [
        name for method in taken for name in ((method, "HEAD") if method == "GET" else (method,))
    ]
