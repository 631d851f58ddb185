"""What endpoints work with: the engine, the configuration, the metrics."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from ..runtime.messages import EngineInfo
from .engine_client import Engine
from .engine_supervisor import AnyEngine, EngineUnavailable
from .limits import Limits
from .metrics import MetricRegistry, Metrics
from .openai.errors import NotFound

if TYPE_CHECKING:
    from .args import CommonServerConfig, ServerConfig

DEFAULT_MODEL = "default"
"""Model name that means the one this server has, as for SGLang; so does no name."""
_THREAD_FROM = 16_384
"""Characters from which texts are tokenised in a thread, so that other requests go on meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyServing:
    """One server, whatever its engine makes: what health, metrics, models and errors need.

    `purpose`: what it is for, in a sentence for who has come to the wrong one.
    """

    purpose: ClassVar[str]

    engine: AnyEngine
    config: CommonServerConfig
    metrics: MetricRegistry
    model_name: str
    started: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Raises `NotFound` for a model that this server does not have."""
        if name not in (None, DEFAULT_MODEL, self.model_name):
            message = f"The model {name!r:.200} does not exist; this server has {self.model_name!r}."
            raise NotFound(message, param="model", code="model_not_found")

    def model_card(self) -> dict[str, Any]:
        """The model as `/v1/models` shows it."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "piecework",
            "root": self.config.engine.model_path,
            "parent": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving(AnyServing):
    """A server of a language model. `live_rids`: ids in use, of sequences and of the requests that they belong to."""

    purpose = "This server has a language model, for POST /v1/chat/completions and POST /v1/completions"

    engine: Engine
    config: ServerConfig
    metrics: Metrics
    live_rids: set[str] = field(default_factory=set)

    @property
    def info(self) -> EngineInfo:
        """Raises `EngineUnavailable` before the engine has been ready for the first time."""
        if self.engine.info is None:
            raise EngineUnavailable(f"the engine is {self.engine.state}")
        return self.engine.info

    @property
    def limits(self) -> Limits:
        info = self.info
        return Limits(min(info.context_length, info.kv_tokens), min(info.vocab_size, self.engine.tokenizer.vocab_size))

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`: the same as long as version, model and number format are."""
        what = f"{__version__} {self.config.engine.model_path} {self.info.dtype} {self.info.device}"
        return f"fp_{hashlib.sha256(what.encode()).hexdigest()[:10]}"

    def model_card(self) -> dict[str, Any]:
        return {**AnyServing.model_card(self), "max_model_len": self.limits.context_length}

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        if sum(map(len, texts)) < _THREAD_FROM:
            return self._encode(texts, add_special_tokens)
        return await asyncio.to_thread(self._encode, texts, add_special_tokens)

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self.engine.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    async def prompt_ids(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of prompts that are texts or ids."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(await self.encode(texts, add_special_tokens=True))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]


async def _any_serving(request: Request) -> AnyServing:
    serving = request.app.state.serving
    assert isinstance(serving, AnyServing)
    return serving


async def _serving(request: Request) -> Serving:
    serving = request.app.state.serving
    assert isinstance(serving, Serving)
    return serving


AnyServingDep = Annotated[AnyServing, Depends(_any_serving)]
"""Parameter of an endpoint that every server has."""

ServingDep = Annotated[Serving, Depends(_serving)]
"""Parameter of an endpoint that receives the application's `Serving`."""


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
