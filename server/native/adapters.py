"""Endpoints of vLLM and SGLang that load and unload adapters (LoRA) of the running model."""

from __future__ import annotations

import asyncio
import os
import re
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from ..core.answers import BODY_ERRORS, Answer, answers
from ..core.errors import InvalidRequest, NotFound
from ..core.schemas import WireModel, only
from ..http.body import JsonRoute
from ..serving.state import Serving, ServingDep, json_response

body_router = APIRouter(route_class=JsonRoute)
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
        if name in serving.config.model_names or (known is not None and not body.load_inplace):
            raise InvalidRequest(
                f"lora_name: {name!r} is in use; take another name, unload the adapter, or send "
                "load_inplace.",
                param="lora_name",
                code="name_in_use",
            )
        answer = await serving.engine.load_adapter(name, path)
        if answer.adapter is None:
            raise InvalidRequest(
                f"lora_path: {answer.error}.", param="lora_path", code=answer.code or "bad_adapter"
            )
        if known is not None and known.identity != answer.adapter.identity:
            # The engine answers when the last request of the old adapter has ended.
            task = asyncio.create_task(serving.engine.unload_adapter(known.identity))
            serving.unloading.add(task)
            task.add_done_callback(serving.unloading.discard)
    return _answer(serving, f"The adapter {name!r} is loaded.")


@body_router.post("/v1/unload_lora_adapter", responses=_ANSWERS)
@body_router.post("/unload_lora_adapter", responses=_ANSWERS)
async def unload_adapter(body: UnloadAdapterBody, serving: ServingDep) -> Response:
    """Unload an adapter. Its running requests finish first."""
    _root(serving)
    known = serving.engine.adapters.get(body.lora_name)
    if known is None:
        raise NotFound(
            f"lora_name: there is no adapter {body.lora_name!r}; /v1/models lists adapters.",
            param="lora_name",
            code="model_not_found",
        )
    await serving.engine.unload_adapter(known.identity)
    return _answer(serving, f"The adapter {body.lora_name!r} is unloaded.")


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
    return os.path.realpath(folder)


def _allowed(serving: Serving, path: str) -> str:
    """Return the path of an adapter below `--lora-root`. Raise `InvalidRequest` for another one."""
    root = _root(serving)
    try:
        chosen = os.path.realpath(os.path.join(root, path))
        is_below = os.path.commonpath([root, chosen]) == root and chosen != root
    except ValueError:  # A byte of zero.
        is_below = False
    if not is_below or not os.path.exists(chosen):
        raise InvalidRequest(
            "lora_path: name a folder or file of an adapter below --lora-root.",
            param="lora_path",
            code="invalid_value",
        )
    return chosen
