"""What endpoints work with: the engine, the configuration and the metrics."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, ParamSpec, TypeVar

import msgspec
from fastapi import Depends
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from ...runtime.core.adapter_info import AdapterInfo
from ...runtime.core.engine_info import EngineInfo
from ...runtime.sampling.defaults import SamplingDefaults
from ...version import __version__
from ..auth.accounts import check_access, may_use
from ..core.answers import Answer
from ..core.errors import InvalidRequest, NotFound
from ..core.limits import MAX_SEQUENCES, Limits
from ..core.model_names import served_name
from ..engine.interface import Engine, TextEngine, unavailable
from ..media.media import EncodedPrompt, Media
from ..media.parts import ImagePart
from ..media.sources import refused
from ..observability.metrics import MetricRegistry, Metrics
from .kept_logprobs import KeptLogprobs

if TYPE_CHECKING:
    from ..config.server import CommonServerConfig, ServerConfig

P = ParamSpec("P")
T = TypeVar("T")
Kind = Literal["text", "images", "pooling", "speech"]  # What a server's model generates.
DEFAULT_MODEL = "default"  # Name of the served model, as for SGLang. A missing name means the same.
# Texts of at least so many characters are processed in a thread, so that the event loop is free.
THREAD_FROM = 8192
_SLICE = 32_768  # Characters of a long prompt that are tokenized at once.
_CUT = 16  # Upper limit of the tokens that cutting a text in two may add.


_CORES_A_THREAD = 4  # The other cores are the engine's.
_MOST = 4


class TextThreads:
    """A fixed number of threads. Work that waits for a thread is dropped if its caller is
    cancelled.
    """

    def __init__(self) -> None:
        count = min(_MOST, max(1, (os.cpu_count() or 1) // _CORES_A_THREAD))
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="text")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `work(*args, **kwargs)`. Calls run in the order of their arrival."""
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, partial(work, *args, **kwargs)
        )


class ModelCard(Answer, kw_only=True):
    """`max_model_len` is set for language models and pooling models, `parent` for adapters.

    Models that read images have `input_modalities`. `image_tokens_1024` is the number of tokens of
    an image of 1024 x 1024 pixels, as soon as it is known.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "piecework"
    root: str
    parent: str | None = None
    max_model_len: int | UnsetType = UNSET
    input_modalities: list[Literal["text", "image"]] | UnsetType = UNSET
    image_tokens_1024: int | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyServing:
    """One server of any kind: what health, metrics, models and errors need.

    `purpose` says in a sentence what the server is for, for clients of the wrong endpoint. `kind`
    says it in a word.
    """

    purpose: ClassVar[str]
    kind: ClassVar[Kind]

    engine: Engine
    config: CommonServerConfig
    metrics: MetricRegistry
    model_name: str
    started: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Raise `NotFound` if this server does not have the model or the key may not use it.

        Raise `InvalidRequest` if `name` is None and the server requires a name.
        """
        if name is None and self.config.require_model:
            raise InvalidRequest(
                f"model: Field required; this server has {self.model_name!r}.",
                param="model",
                code="missing_required_parameter",
            )
        adapter, names = self.adapter_of(name), self.config.model_names
        known = name is None or name in names or served_name(name, names) in (DEFAULT_MODEL, *names)
        if not known and adapter is None:
            message = (
                f"The model {name!r:.200} does not exist; this server has "
                f"{' and '.join(map(repr, names))}."
            )
            raise NotFound(message, param="model", code="model_not_found")
        if not self.may_be_used() and not (adapter is not None and may_use(adapter.name)):
            check_access(self.model_name)

    @property
    def names(self) -> list[str]:
        """The names of the model and of its adapters."""
        return [*self.config.model_names, *self.engine.adapters]

    def adapter_of(self, name: str | None) -> AdapterInfo | None:
        """Return the adapter (LoRA) that a request means by `NAME` or `MODEL:NAME`, or None."""
        if name is None or not self.engine.adapters:
            return None
        name = served_name(name, self.names)
        model, _, own = name.rpartition(":")
        return self.engine.adapters.get(own if model in self.config.model_names else name)

    def may_be_used(self) -> bool:
        """Return whether the key of the current request may use the model under any of its
        names.
        """
        return any(map(may_use, self.config.model_names))

    def model_card(self) -> ModelCard:
        """Return the model's entry of `/v1/models`."""
        return ModelCard(
            id=self.model_name, created=self.started, root=self.config.engine.model_path
        )

    def model_cards(self) -> list[ModelCard]:
        """Return an entry for each name of the model."""
        return [replace(self.model_card(), id=name) for name in self.config.model_names]


@dataclass(slots=True, kw_only=True)
class ServedWeights:
    """The weights in use: their `path` if they were replaced, and the client's `version`."""

    path: str | None = None
    version: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving(AnyServing):
    """A server of a language model.

    `live_rids` are the ids in use, of sequences and of the requests that they belong to.
    """

    purpose = (
        "This server has a language model, for POST /v1/chat/completions and POST /v1/completions; "
        "vectors need a server of their own (--runner pooling)"
    )
    kind = "text"

    engine: TextEngine
    config: ServerConfig
    metrics: Metrics
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    live_rids: set[str] = field(default_factory=set)
    changing_adapters: asyncio.Lock = field(default_factory=asyncio.Lock)
    unloading: set[asyncio.Task[Any]] = field(default_factory=set)
    weights: ServedWeights = field(default_factory=ServedWeights)
    kept_logprobs: KeptLogprobs = field(default_factory=KeptLogprobs)
    threads: TextThreads = field(default_factory=TextThreads)
    media: Media | None = None  # Reads images; None if the model reads only text.

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine. Raises `EngineUnavailable` until the engine was ready once."""
        if self.engine.info is None:
            raise unavailable(self.engine)
        return self.engine.info

    @property
    def limits(self) -> Limits:
        info = self.info
        return Limits(
            min(info.context_length, info.kv_tokens),
            min(info.vocab_size, self.engine.tokenizer.vocab_size),
        )

    @property
    def sampling(self) -> dict[str, Any]:
        """Default sampling parameters, by the names of `SamplingParams`."""
        values = self.sampling_defaults.values
        return {name: value for name, value in values.items() if name != "max_new_tokens"}

    @property
    def default_max_tokens(self) -> int:
        """Upper limit of the tokens of a chat answer without a limit of its own."""
        given: int | None = self.sampling_defaults.values.get("max_new_tokens")
        return self.config.default_max_tokens if given is None else given

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`: changes with the version, the model, the number format and the
        device.
        """
        return _fingerprint(self.config.engine.model_path, self.info.dtype, self.info.device)

    def model_card(self) -> ModelCard:
        card = AnyServing.model_card(self)
        card.max_model_len = self.limits.context_length
        if self.media is not None:
            card.input_modalities = ["text", "image"]
            if self.media.info is not None:
                card.image_tokens_1024 = self.media.info.tokens_of_1024
        return card

    def model_cards(self) -> list[ModelCard]:
        """Return an entry for each name of the model, and for each adapter."""
        adapters = [
            replace(self.model_card(), id=name, root=adapter.path, parent=self.model_name)
            for name, adapter in self.engine.adapters.items()
        ]
        return AnyServing.model_cards(self) + adapters

    def adapter_for(self, model: str | None, lora_path: str) -> AdapterInfo:
        """Return the adapter that a request chooses by SGLang's `lora_path`.

        Raise `NotFound` if it is unknown, and `InvalidRequest` if the model is another adapter.
        """
        named = self.adapter_of(model)
        chosen = self.engine.adapters.get(lora_path)
        if chosen is None:
            raise NotFound(
                f"lora_path: there is no adapter {lora_path!r:.200}; /v1/models lists adapters.",
                param="lora_path",
                code="model_not_found",
            )
        if named not in (None, chosen):
            raise InvalidRequest(
                f"lora_path: the model {model!r:.200} is another adapter; send one of them.",
                param="lora_path",
                code="invalid_value",
            )
        return chosen

    def check_room(self, sequences: int, param: str) -> None:
        """Check whether the engine has room for `sequences` more sequences.

        Raise `InvalidRequest`, `QueueFull` or `EngineUnavailable`.
        """
        most = min(MAX_SEQUENCES, self.engine.capacity)
        if sequences > most:
            message = (
                f"{param}: the request has {sequences} prompts, samples counted, more than "
                f"{most}; send several requests."
            )
            raise InvalidRequest(message, param=param, code="too_many_sequences")
        self.engine.require_room(sequences)

    async def encode(self, text: str, *, add_special_tokens: bool, param: str | None) -> list[int]:
        """Return the token ids of a text. `param` names the parameter if the text is a prompt.

        Raise `InvalidRequest` for a prompt that does not fit the context, as soon as that is known.
        """
        if len(text) < THREAD_FROM:
            return self.engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if param is not None:
            await self._check_fits(text, param)
        return await self.threads.run(
            self.engine.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )

    async def _check_fits(self, text: str, param: str) -> None:
        """Count tokens slice by slice. Raise `InvalidRequest` once there are too many."""
        tokens = 0
        for begin in range(0, len(text), _SLICE):
            ids = await self.threads.run(
                self.engine.tokenizer.encode, text[begin : begin + _SLICE], add_special_tokens=False
            )
            tokens += max(0, len(ids) - _CUT)
            self.limits.check_length(tokens, param)

    def media_for(self, param: str) -> Media:
        """Return the reader of images. Raise `InvalidRequest` if the model reads only text."""
        if self.media is None:
            raise refused(
                param,
                f"the model {self.model_name!r} reads only text; leave the image out, or use a "
                "model that reads images",
                code="unsupported_content",
            )
        return self.media

    async def encode_with_images(
        self,
        text: str,
        parts: Sequence[ImagePart],
        param: str,
        *,
        add_special_tokens: bool,
        counting: bool = False,
    ) -> EncodedPrompt:
        """Return the token ids and the images of a prompt with a placeholder for each of `parts`.

        There is at least one. If `counting`, the prompt may be longer than the context. Raise
        `InvalidRequest`.
        """
        media = self.media_for(parts[0].param)
        if not counting:
            await self._check_fits(text, param)
        return await media.prompt(text, parts, param, add_special_tokens=add_special_tokens)

    async def prompt_ids(
        self, prompts: Sequence[str | list[int]], param: str, *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of prompts, which are texts or ids from the parameter `param`.

        Raise `InvalidRequest` for a prompt that does not fit the context.
        """
        return [
            await self.encode(prompt, add_special_tokens=add_special_tokens, param=param)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]


@cache
def _fingerprint(*what: str) -> str:
    return f"fp_{hashlib.sha256(' '.join([__version__, *what]).encode()).hexdigest()[:10]}"


async def serving_of(request: Request) -> Any:
    """Return the serving object that the request's application was built with."""
    return request.app.state.serving


# Parameter of endpoints of every server.
AnyServingDep = Annotated[AnyServing, Depends(serving_of)]
# Parameter of endpoints of servers of a language model.
ServingDep = Annotated[Serving, Depends(serving_of)]


def json_response(content: Answer | Sequence[Answer] | msgspec.Raw) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
