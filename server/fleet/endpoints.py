"""The endpoints of a server of several models: list them, load and unload them."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from msgspec.structs import asdict, replace
from starlette.requests import Request
from starlette.responses import Response

from ..anthropic.models import MessagesModel, MessagesModels, model_info, model_list
from ..audio.state import SpeechServing
from ..auth.accounts import check_access, may_use
from ..config.images import ImageServerConfig
from ..config.pooling import PoolingServerConfig
from ..config.server import ServerConfig
from ..config.speech import SpeechServerConfig
from ..core.answers import BODY_ERRORS, Answer, ErrorAnswer, answers
from ..core.anthropic_errors import VERSION_HEADER, MessagesErrorAnswer
from ..core.errors import NotFound
from ..core.schemas import WireModel
from ..http.body import JsonRoute
from ..images.generations import FILE_ROUTE, get_file
from ..images.state import ImageServing
from ..native.control import AbortCount
from ..native.requests import AbortBody
from ..page import status as page_status
from ..page.status import ServerStatus
from ..pooling.state import PoolingServing
from ..serving.state import AnyServingDep, Kind, ModelCard, Serving, json_response
from .dispatch import list_names
from .fleet import Fleet
from .member import Member, MemberState

router = APIRouter()
body_router = APIRouter(route_class=JsonRoute)
_ERROR = ErrorAnswer | MessagesErrorAnswer
_KINDS: dict[type, Kind] = {
    ServerConfig: Serving.kind,
    ImageServerConfig: ImageServing.kind,
    PoolingServerConfig: PoolingServing.kind,
    SpeechServerConfig: SpeechServing.kind,
}


class MemberStatus(Answer):
    """The state of a model.

    `kind` is the kind of its output. `memory` is what it takes now, and `memory_needed` its
    maximum, both in bytes. `failure` is the reason why it failed.
    """

    kind: Kind
    value: MemberState
    requests: int
    waiting: int
    memory: int
    memory_needed: int
    pinned: bool
    idle_seconds: float | None
    failure: str | None


class MemberCard(ModelCard, kw_only=True):
    status: MemberStatus


class MemberList(Answer, kw_only=True):
    object: Literal["list"] = "list"
    data: list[MemberCard]


class ModelBody(WireModel):
    """The name of a model."""

    model: str


async def _fleet_of(request: Request) -> Fleet:
    found: Fleet = request.app.state.serving.engine
    return found


FleetDep = Annotated[Fleet, Depends(_fleet_of)]


@router.get("/v1/models", responses=answers(MemberList | MessagesModels, error=_ERROR))
async def list_models(request: Request, fleet: FleetDep) -> Response:
    """List all models of this server and their states."""
    cards = list[MemberCard]()
    for member in fleet.members.values():
        own = card(fleet, member)
        cards += [own] if may_use(member.name) else []
        cards += [
            replace(own, id=name, root=path, parent=member.name)
            for name, path in member.adapters.items()
            if may_use(member.name) or may_use(name)
        ]
    if VERSION_HEADER in request.headers:
        return json_response(model_list(cards))
    return json_response(MemberList(data=cards))


@router.get(
    "/v1/models/{model_id:path}",
    responses=answers(MemberCard | MessagesModel, errors=(404,), error=_ERROR),
)
async def retrieve_model(model_id: str, request: Request, fleet: FleetDep) -> Response:
    """Return one model by its name."""
    found = card(fleet, member_named(fleet, model_id))
    return json_response(model_info(found) if VERSION_HEADER in request.headers else found)


@body_router.post("/v1/models/load", responses=answers(MemberCard, errors=BODY_ERRORS))
async def load_model(body: ModelBody, fleet: FleetDep) -> Response:
    """Load a model and answer once it is ready."""
    member = member_named(fleet, body.model)
    await fleet.load(member)
    return json_response(card(fleet, member))


@body_router.post("/v1/models/unload", responses=answers(MemberCard, errors=BODY_ERRORS))
async def unload_model(body: ModelBody, fleet: FleetDep) -> Response:
    """Unload a model once its requests have ended, then answer.

    Requests that arrive meanwhile wait and cause the model to be loaded again.
    """
    member = member_named(fleet, body.model)
    await fleet.unload(member)
    return json_response(card(fleet, member))


@body_router.post("/abort_request", responses=answers(AbortCount, errors=(400, 413, 415)))
async def abort_request(body: AbortBody, fleet: FleetDep) -> Response:
    """Abort one request or all requests, on every model."""
    rid = None if body.abort_all else body.rid
    engines: list[Any] = [
        each.service.engine for each in fleet.members.values() if each.service is not None
    ]
    return json_response(AbortCount(sum([await engine.abort(rid) for engine in engines])))


@router.get("/v1/status", responses=answers(ServerStatus, errors=(404,)))
async def status(fleet: FleetDep, serving: AnyServingDep, model: str | None = None) -> Response:
    """Return what a model does now; without `model`, that of the last used loaded model."""
    ready = [each for each in fleet.members.values() if each.admits and may_use(each.name)]
    member = (
        member_named(fleet, model)
        if model is not None
        else max(ready, key=lambda each: each.last_used, default=None)
    )
    if member is None or member.service is None:
        return await page_status.status(serving)
    return await page_status.status(member.service.app.state.serving)


@router.get(**FILE_ROUTE)
async def get_image(name: str, fleet: FleetDep) -> Response:
    """Return an image of a model that is loaded or was, until the image expires."""
    for member in fleet.members.values():
        serving = None if member.service is None else member.service.app.state.serving
        if isinstance(serving, ImageServing) and serving.store.get(name) is not None:
            return await get_file(name, serving)
    raise NotFound("There is no such image, or it has expired.", code="image_not_found")


def card(fleet: Fleet, member: Member) -> MemberCard:
    """Return a model in the form of `/v1/models`."""
    config, service = member.config, member.service
    if service is not None and service.engine.info is not None:
        plain: ModelCard = service.app.state.serving.model_card()
    else:
        root = config.server.engine.model_path
        plain = ModelCard(id=member.name, created=fleet.started, root=root)
    is_ready = member.state is MemberState.READY
    idle = time.monotonic() - member.last_used if is_ready and member.is_idle else None
    status = MemberStatus(
        kind=_KINDS[type(config.server)],
        value=fleet.status(member),
        requests=member.under_way,
        waiting=fleet.waiting_for(member),
        memory=member.resident,
        memory_needed=member.size,
        pinned=config.pinned,
        idle_seconds=None if idle is None else round(idle, 1),
        failure=member.failure,
    )
    return MemberCard(**asdict(plain), status=status)


def member_named(fleet: Fleet, name: str) -> Member:
    """Return a model. Raises `NotFound`, also if the request's key may not use it."""
    check_access(name)
    if name not in fleet.members:
        raise NotFound(
            f"The model {name!r:.200} does not exist; this server has {list_names(fleet.members)}.",
            param="model",
            code="model_not_found",
        )
    return fleet.members[name]
