"""Ollama's endpoints that tell of models, and those that change models, which are not offered.

A fleet has `/api/tags`, `/api/ps` and `/api/show` of its own.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...runtime.core.engine_info import EngineInfo
from ...runtime.core.pooling_messages import PoolingInfo
from ...runtime.tokenizer.infill import find_infill
from ...version import __version__
from ..core.answers import BODY_ERRORS, Answer, answers
from ..core.errors import NotImplementedHere
from ..core.model_names import with_tag
from ..core.ollama_errors import OllamaErrorAnswer
from ..http.body import CurlJsonRoute
from ..openai.conversation import reasoning_of
from ..serving.state import AnyServing, AnyServingDep, Serving, json_response
from .requests import ShowRequest

version_router = APIRouter()
router = APIRouter()
show_router = APIRouter(route_class=CurlJsonRoute)
# The version of Ollama whose API this is. Clients compare it with the version that they need.
API_VERSION = "0.12.11"
# `expires_at` of a model that stays loaded.
NEVER = "2999-12-31T23:59:59Z"
_OTHERS = (
    ("POST", "/api/pull"),
    ("POST", "/api/push"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
    ("GET", "/api/blobs/{digest}"),  # for HEAD, which Ollama has
    ("POST", "/api/blobs/{digest}"),
)
Capability = Literal["completion", "tools", "insert", "thinking", "embedding", "vision"]


class OllamaVersion(Answer):
    """`version` is the version of Ollama's API, `piecework` that of this server."""

    version: str
    piecework: str


class OllamaDetails(Answer, kw_only=True):
    """Members that are not known, or not known before the model is loaded, are empty."""

    parent_model: str = ""
    format: Literal["gguf", "safetensors"]
    family: str = ""
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Answer, kw_only=True):
    """`size` is the memory of the model in bytes. `digest` stands for its name and its path."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(Answer):
    models: list[OllamaModel]


class RunningModel(Answer, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(Answer):
    models: list[RunningModel]


class OllamaShow(Answer, kw_only=True):
    """`parameters` are default sampling parameters. `template` is the chat template, in Jinja."""

    modelfile: str
    parameters: str = ""
    template: str = ""
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Capability]
    modified_at: str


class Known(NamedTuple):
    """What is known of a model. `info` is None before the model was loaded."""

    name: str
    path: str
    since: int
    size: int
    info: EngineInfo | PoolingInfo | None

    @property
    def family(self) -> str:
        return "" if self.info is None else self.info.architecture.partition("For")[0].lower()

    @property
    def about(self) -> dict[str, Any]:
        """The members that every list of models has."""
        name = with_tag(self.name)
        digest = hashlib.sha256(f"{self.name} {self.path}".encode()).hexdigest()
        return {"name": name, "model": name, "digest": digest, "details": self.details()}

    def details(self) -> OllamaDetails:
        level = ""
        if self.info is not None:
            formats = getattr(self.info, "quantization", None)
            # The first format has the most bytes: "120 layers in Q4_1: 63.9 MiB".
            level = re.split("[:,]", formats[0])[0].split()[-1] if formats else self.info.dtype
        return OllamaDetails(
            format="gguf" if self.path.endswith(".gguf") else "safetensors",
            family=self.family,
            families=[self.family] if self.family else [],
            quantization_level=level,
        )

    def listed(self) -> OllamaModel:
        """Return the entry of `/api/tags`."""
        return OllamaModel(modified_at=_time(self.since), size=self.size, **self.about)

    def running(self, expires_at: str = NEVER) -> RunningModel:
        """Return the entry of `/api/ps`."""
        info = self.info
        on_device = info is not None and info.device != "cpu"
        return RunningModel(
            size=self.size,
            size_vram=self.size if on_device else 0,
            expires_at=expires_at,
            context_length=0 if info is None else info.context_length,
            **self.about,
        )

    def shown(self) -> OllamaShow:
        """Return the answer of `/api/show` without what only a loaded model tells."""
        about: dict[str, Any] = {"general.architecture": self.family}
        if self.info is not None:
            about[f"{self.family}.context_length"] = self.info.context_length
        capabilities: list[Capability] = ["completion"]
        if isinstance(self.info, PoolingInfo):
            about[f"{self.family}.embedding_length"] = self.info.size
            capabilities = ["embedding"] if self.info.task == "embed" else []
        return OllamaShow(
            modelfile=f"FROM {self.path}",
            details=self.details(),
            model_info=about,
            capabilities=capabilities,
            modified_at=_time(self.since),
        )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def known(serving: AnyServing) -> Known:
    """Return what is known of the model of a server."""
    info: Any = serving.engine.info
    size = 0 if info is None else info.weight_bytes + getattr(info, "kv_bytes", 0)
    path = serving.config.engine.model_path
    return Known(serving.model_name, path, serving.started, size, info)


def show(serving: AnyServing) -> OllamaShow:
    """Return the answer of `/api/show` for the model of a server."""
    shown = known(serving).shown()
    if not isinstance(serving, Serving):
        return shown
    tokenizer = serving.engine.tokenizer
    if tokenizer.chat_template is not None:
        shown.template = tokenizer.chat_template
        shown.capabilities.append("tools")
    if serving.media is not None:
        shown.capabilities.append("vision")
    if find_infill(tokenizer) is not None:
        shown.capabilities.append("insert")
    if reasoning_of(serving) is not None:
        shown.capabilities.append("thinking")
    shown.parameters = "\n".join(f"{name} {value:g}" for name, value in serving.sampling.items())
    return shown


@router.get("/api/tags", responses=answers(OllamaModels, error=OllamaErrorAnswer))
async def list_models(serving: AnyServingDep) -> Response:
    """List the model of this server, once for each of its names."""
    names = serving.names if serving.may_be_used() else ()
    found = known(serving)
    return json_response(OllamaModels([found._replace(name=name).listed() for name in names]))


@router.get("/api/ps", responses=answers(RunningModels, error=OllamaErrorAnswer))
async def list_running(serving: AnyServingDep) -> Response:
    """List the model of this server if it is loaded."""
    is_loaded = serving.engine.info is not None and serving.may_be_used()
    return json_response(RunningModels([known(serving).running()] if is_loaded else []))


SHOW = answers(OllamaShow, errors=BODY_ERRORS, error=OllamaErrorAnswer)


@show_router.post("/api/show", responses=SHOW)
async def show_model(body: ShowRequest, serving: AnyServingDep) -> Response:
    """Describe a model."""
    serving.check_model(body.model)
    return json_response(show(serving))


@version_router.get("/api/version", responses=answers(OllamaVersion, error=OllamaErrorAnswer))
async def version() -> Response:
    """Return the version of Ollama's API that this server has, and its own."""
    return json_response(OllamaVersion(API_VERSION, __version__))


async def _not_offered(request: Request) -> Response:
    raise NotImplementedHere(
        f"{request.url.path:.200} is not offered: clients cannot change this server's models. "
        "Download a model by `piecework pull MODEL`, and start the server with it.",
        code="not_implemented",
    )


_NOT_OFFERED = answers(errors=(501,), error=OllamaErrorAnswer)
del _NOT_OFFERED[200]
for _method, _path in _OTHERS:
    version_router.add_api_route(
        _path,
        _not_offered,
        methods=[_method],
        summary="Not offered",
        status_code=501,
        responses=_NOT_OFFERED,
    )
