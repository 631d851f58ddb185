"""Dispatches each request to the application of the model that it names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from ..auth.accounts import check_access, may_unload, may_use
from ..core.errors import ClientGone, InvalidRequest, NotFound, Unavailable, as_api_error
from ..core.model_names import served_name
from ..core.ollama_errors import is_ollama
from ..http.body import (
    LARGE_BODY_BYTES,
    MAX_LARGE_BYTES,
    JsonRoute,
    has_no_body,
    read_json_body,
)
from ..http.form import FormRoute, model_and_stream, read_form_body
from ..ollama.keep_alive import seconds_of
from ..serving.collector import unless_client_goes
from ..serving.state import DEFAULT_MODEL
from .fleet import Fleet
from .member import Member
from .waiting import STREAMED_PATHS, WaitingStream

# Header of answers that waited for their model: their first place in the queue.
QUEUE_PLACE = b"x-queue-place"
# Keys that the fleet's application adds to a scope. The member's application adds its own.
_APPLICATION_KEYS = ("app", "router", "endpoint", "path_params", "route")
Routes = Mapping[type, Sequence[BaseRoute]]  # From a class of settings to its routes.


class _Named(msgspec.Struct):
    """The fields of a body that are read here. The rest is only checked to be JSON.

    Raw fields are not decoded, so a body with millions of lists creates no objects.
    """

    model: msgspec.Raw = msgspec.Raw(b"null")
    stream: msgspec.Raw = msgspec.Raw(b"null")
    keep_alive: msgspec.Raw = msgspec.Raw(b"null")


class MemberRoute(BaseRoute):
    """Matches every path of the models' applications that the fleet's own application lacks.

    A request names its model by the field `model` of its JSON body or form, or by its query if it
    has no body. Without a name, or with "default", it goes to the first model that serves the path.
    """

    def __init__(self, fleet: Fleet, routes: Routes) -> None:
        self._fleet, self._routes = fleet, routes
        self._held = 0  # Bytes of large bodies of requests that wait for their model.

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        found = self._find(self._routes, scope)
        return (Match.NONE, {}) if found is None else (found[0], {})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._find(self._routes, scope)
        assert found is not None
        match, route = found
        if match is Match.PARTIAL:
            await route.handle(scope, receive, send)  # answers 405 with the allowed methods
            return
        request = Request(scope, receive)
        named = request.query_params.get("model")
        if isinstance(route, JsonRoute):
            is_left_out = route.empty and has_no_body(request)
            content = b"" if is_left_out else bytes(await read_json_body(request))
            body_names, streams, keep_alive = _read(content or route.empty)
            member = self._member(body_names if body_names is not None else named, scope)
            if streams is None:
                streams = is_ollama(scope["path"])
            if is_ollama(scope["path"]) and may_unload():
                member.keep_alive = keep_alive
            is_stream = streams and scope["path"] in STREAMED_PATHS
            async with self._reserve(len(content), member):
                await self._serve(member, content, scope, receive, send, is_stream=is_stream)
            return
        if isinstance(route, FormRoute):
            content = await read_form_body(request, route.most)
            form_names, streams = await model_and_stream(request.headers, content)
            member = self._member(form_names or named, scope)
            is_stream = streams and scope["path"] in STREAMED_PATHS
            async with self._reserve(len(content), member):
                await self._serve(member, content, scope, receive, send, is_stream=is_stream)
            return
        member = self._member(named, scope, only_ready=True)
        if not member.admits or member.service is None:
            raise Unavailable(
                f"The model {member.name} is {self._fleet.status(member)}; load it by POST "
                "/v1/models/load.",
                code="model_not_loaded",
                headers={"Retry-After": "5"},
            )
        async with self._fleet.use(member):
            await member.service.app(_inner(scope), receive, send)

    async def _serve(
        self,
        member: Member,
        content: bytes,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        is_stream: bool,
    ) -> None:
        """Wait for the model while the client stays connected, then let it answer.

        A stream is kept open meanwhile.
        """
        interval = scope["app"].state.serving.config.sse_ping_interval
        answer = WaitingStream(scope, send, interval)
        try:
            async with AsyncExitStack() as stack:
                # The stack leaves the model even if this task is cancelled right after entering.
                entering = stack.enter_async_context(self._fleet.use(member))
                if member.admits:
                    place = await entering
                else:
                    waiting = unless_client_goes(receive, entering)
                    place = await (answer.wait(waiting) if is_stream else waiting)
                assert member.service is not None
                send_placed = _with_place(answer.send, place)
                await member.service.app(_inner(scope), _replayed(content, receive), send_placed)
        except Exception as error:
            if not answer.is_open:
                raise
            if not isinstance(error, ClientGone):
                known = as_api_error(error)
                scope["app"].state.serving.metrics.count_error(known.type)
                await answer.fail(known)

    @asynccontextmanager
    async def _reserve(self, size: int, member: Member) -> AsyncIterator[None]:
        """Count a body that waits for its model. Raises `Unavailable` if too many bytes wait."""
        held = 0 if member.admits or size <= LARGE_BODY_BYTES else size
        if self._held + held > MAX_LARGE_BYTES:
            raise Unavailable(
                f"The bodies of requests that wait for models exceed {MAX_LARGE_BYTES} bytes. "
                "Try again in 5 s.",
                code="bodies_full",
                headers={"Retry-After": "5"},
            )
        self._held += held
        try:
            yield
        finally:
            self._held -= held

    def _member(self, name: str | None, scope: Scope, *, only_ready: bool = False) -> Member:
        """Return the model of a request. Raises `NotFound` if no model fits name and path."""
        members = self._fleet.members
        if name and served_name(name, members) != DEFAULT_MODEL:
            return self._named(name, scope)
        fitting = [each for each in members.values() if self._takes(each, scope)]
        allowed = [each for each in fitting if may_use(each.name)]
        if not allowed:
            check_access(fitting[0].name)
        ready = [each for each in allowed if each.admits] if only_ready else []
        return (ready or allowed)[0]

    def _named(self, name: str, scope: Scope) -> Member:
        members = self._fleet.members
        adapters = [each for member in members.values() for each in member.adapters]
        name = served_name(name, [*members, *adapters])
        named = (each.name for each in members.values() if _means(name, each))
        own = name if name in members else next(named, name)
        if not may_use(name):
            check_access(own)
        if own not in members:
            raise NotFound(
                f"The model {name!r:.200} does not exist; this server has {list_names(members)}.",
                param="model",
                code="model_not_found",
            )
        if not self._takes(members[own], scope):
            fitting = [each.name for each in members.values() if self._takes(each, scope)]
            raise NotFound(
                f"The model {name!r} does not answer {scope['path']:.200}; models that do: "
                f"{list_names(fitting)}.",
                param="model",
                code="model_not_for_path",
            )
        return members[own]

    def _takes(self, member: Member, scope: Scope) -> bool:
        kind = type(member.config.server)
        found = self._find({kind: self._routes[kind]}, scope)
        return found is not None and found[0] is Match.FULL

    @staticmethod
    def _find(routes: Routes, scope: Scope) -> tuple[Match, BaseRoute] | None:
        """Return the route of a request, or a route with its path but another method."""
        partial = None
        for route in (route for kind in routes.values() for route in kind):
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return match, route
            if match is Match.PARTIAL and partial is None:
                partial = (match, route)
        return partial


def _means(name: str, member: Member) -> bool:
    """Whether a name is that of a model, or of one of its adapters, which it may precede."""
    model, _, adapter = name.rpartition(":")
    return adapter in member.adapters if model == member.name else name in member.adapters


def list_names(names: Iterable[str]) -> str:
    """List at most 10 names of models that the key of this request may use."""
    listed = [repr(name) for name in names if may_use(name)] or ["none"]
    return ", ".join(listed[:10]) + (f" and {len(listed) - 10} more" if len(listed) > 10 else "")


def _read(content: bytes) -> tuple[str | None, bool | None, float | None]:
    """Return the model that a body names, whether it asks for a stream, and for how many seconds
    it keeps the model loaded. Each is None if the body does not say.

    Raises `InvalidRequest` if the body is no JSON object or `model` is no string.
    """
    if not content:
        raise InvalidRequest("The request body is empty; send a JSON object.", code="invalid_json")
    try:
        body = msgspec.json.decode(content, type=_Named)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"The request body is not valid JSON: {error}. Send a JSON object in UTF-8."
        raise InvalidRequest(message, code="invalid_json") from None
    try:
        streams = None if bytes(body.stream) == b"null" else bytes(body.stream) == b"true"
        keep_alive = seconds_of(bytes(body.keep_alive))
        return msgspec.json.decode(body.model, type=str | None), streams, keep_alive
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest(
            "model: input should be a valid string.", param="model", code="invalid_value"
        ) from None


def _inner(scope: Scope) -> Scope:
    return {
        name: value
        for name, value in scope.items()
        if name not in _APPLICATION_KEYS and not name.startswith(("fastapi", "starlette."))
    }


def _replayed(content: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body which was already read, then later messages."""
    is_sent = False

    async def replay() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": content, "more_body": False}

    return replay


def _with_place(send: Send, place: int) -> Send:
    if place == 0:
        return send

    async def send_on(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (QUEUE_PLACE, str(place).encode())]
            message = {**message, "headers": headers}
        await send(message)

    return send_on
