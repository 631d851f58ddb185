"""Endpoints of vLLM and SGLang that load and unload adapters (LoRA) of the running model."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from ..core.allowed_path import path_below
from ..core.answers import BODY_ERRORS, Answer, answers
from ..core.errors import InvalidRequest, NotFound
from ..core.schemas import WireModel, only
from ..http.body import JsonRoute
from ..serving.state import DEFAULT_MODEL, Serving, ServingDep, json_response

body_router = APIRouter(route_class=JsonRoute)
_MOST_ADAPTERS = 1000  # Names of adapters at once.
_NAME = re.compile(r"[\w][\w./@+-]{0,199}")


class LoadAdapterBody(WireModel):
    """Body of `POST /v1/load_lora_adapter`.

    `load_inplace` replaces an adapter that has the name already. Its running requests finish.
    """

    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False
    pinned: Annotated[Any, only(False)] = None


class UnloadAdapterBody(WireModel):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1, max_length=200)]


class Adapters(Answer):
    """`loaded_adapters` has the path of each adapter by its name, after the change."""

    success: bool
    message: str
    loaded_adapters: dict[str, str]


_ANSWERS = answers(Adapters, errors=BODY_ERRORS)


@body_router.post("/v1/load_lora_adapter", responses=_ANSWERS)
@body_router.post("/load_lora_adapter", responses=_ANSWERS)
async def load_adapter(body: LoadAdapterBody, serving: ServingDep) -> Response:
    """Load an adapter from a folder or file below `--lora-root`. Requests go on meanwhile."""
    path = await asyncio.to_thread(_allowed, serving, body.lora_path)
    name = body.lora_name
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"lora_name: {name!r:.200} is not a name of letters, digits and ./@+-.",
            param="lora_name",
            code="invalid_value",
        )
    async with serving.changing_adapters:
        known = serving.engine.adapters.get(name)
        is_taken = name in (DEFAULT_MODEL, *serving.config.model_names)
        if is_taken or (known is not None and not body.load_inplace):
            raise InvalidRequest(
                f"lora_name: {name!r} is in use; take another name, unload the adapter, or send "
                "load_inplace.",
                param="lora_name",
                code="name_in_use",
            )
        if known is None and len(serving.engine.adapters) >= _MOST_ADAPTERS:
            raise InvalidRequest(
                f"lora_name: there are {_MOST_ADAPTERS} adapters already; unload one.",
                param="lora_name",
                code="too_many_adapters",
            )
        answer = await serving.engine.load_adapter(name, path)
        if answer.adapter is None:
            raise InvalidRequest(
                f"lora_path: {answer.error}.", param="lora_path", code=answer.code or "bad_adapter"
            )
        if known is not None:
            _unload_unnamed(serving, known.identity)
    return _answer(serving, f"The adapter {name!r} is loaded.")


@body_router.post("/v1/unload_lora_adapter", responses=_ANSWERS)
@body_router.post("/unload_lora_adapter", responses=_ANSWERS)
async def unload_adapter(body: UnloadAdapterBody, serving: ServingDep) -> Response:
    """Unload an adapter. Its running requests finish first."""
    _root(serving)
    async with serving.changing_adapters:
        known = serving.engine.adapters.pop(body.lora_name, None)
        if known is None:
            raise NotFound(
                f"lora_name: there is no adapter {body.lora_name!r}; /v1/models lists adapters.",
                param="lora_name",
                code="model_not_found",
            )
        unloading = _unload_unnamed(serving, known.identity)
    if unloading is not None:
        await unloading
    return _answer(serving, f"The adapter {body.lora_name!r} is unloaded.")


def _unload_unnamed(serving: Serving, identity: str) -> asyncio.Task[Any] | None:
    """Unload an adapter, unless a name still means it. The task ends with its last request.

    Call this inside of `changing_adapters`, so that no load of the same adapter is under way.
    """
    if any(each.identity == identity for each in serving.engine.adapters.values()):
        return None
    task = asyncio.create_task(serving.engine.unload_adapter(identity))
    serving.unloading.add(task)
    task.add_done_callback(serving.unloading.discard)
    return task


def _answer(serving: Serving, message: str) -> Response:
    loaded = {name: adapter.path for name, adapter in serving.engine.adapters.items()}
    return json_response(Adapters(success=True, message=message, loaded_adapters=loaded))


def _root(serving: Serving) -> str:
    folder = serving.config.lora_root
    if folder is None:
        raise InvalidRequest(
            "Adapters cannot be changed while this server runs; start it with --lora-root FOLDER.",
            code="adapters_off",
        )
    return folder


def _allowed(serving: Serving, path: str) -> str:
    """Return the path of an adapter below `--lora-root`. Raise `InvalidRequest` for another one."""
    chosen = path_below(_root(serving), path, is_inside=True)
    if chosen is None:
        raise InvalidRequest(
            "lora_path: name a folder or file of an adapter below --lora-root.",
            param="lora_path",
            code="invalid_value",
        )
    return chosen
