"""Makes the service of a language model, a diffusion pipeline, a pooling or a speech model."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from functools import partial

from ..runtime.config.engine import EngineConfig
from ..runtime.files.resolve import resolve_model_path
from ..runtime.multimodal.source import asked_source
from ..runtime.sampling.defaults import SamplingDefaults, read_sampling_defaults
from ..runtime.tokenizer.chat_template import ChatTemplates
from ..runtime.tokenizer.template_reads import template_reads
from ..runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer
from .app import create_app
from .config.images import ImageServerConfig
from .config.pooling import PoolingServerConfig
from .config.server import ServerConfig
from .config.speech import SpeechServerConfig
from .engine.client import EngineClient
from .engine.interface import TextEngine
from .engine.replicas import Replicas
from .engine.settings import settings_of
from .media.media import Media
from .media.process import PreprocessProcesses
from .openai.stored.kept import check_store
from .parsing.choice import AUTO, choose_format, choose_reasoning
from .parsing.detection import detect
from .serving.service import Service
from .summary import summary

AnyServerConfig = ServerConfig | ImageServerConfig | PoolingServerConfig | SpeechServerConfig


def service_of(
    config: AnyServerConfig, process: subprocess.Popen[bytes] | None
) -> Callable[[], Service]:
    """Check the settings and return a function that makes the service in its event loop.

    `process` is a process of `config.engine_command` that waits for its job, or None. The check may
    run in any thread and takes as long as reading a tokenizer. Raises `ValueError`.
    """
    if isinstance(config, ImageServerConfig):
        from .image_service import image_service

        return lambda: image_service(config, process)
    if isinstance(config, PoolingServerConfig):
        from .pooling_service import pooling_service

        return pooling_service(config, process)
    if isinstance(config, SpeechServerConfig):
        from .speech_service import speech_service

        return speech_service(config, process)
    model_path = resolve_model_path(config.engine.model_path)
    tokenizer = load_tokenizer(
        model_path,
        config.engine.tokenizer_path,
        config.chat_template,
        gguf_pre_tokenizer=config.engine.gguf_pre_tokenizer,
    )
    defaults = read_sampling_defaults(
        config.sampling_defaults, config.engine.model_path, model_path
    )
    rows = _chat_rows(config, tokenizer.templates) | {"sampling": str(defaults)}
    check_store(config)
    images = _image_arguments(config.engine, model_path)
    return lambda: _text_service(config, tokenizer, defaults, rows, images, process)


def _image_arguments(engine: EngineConfig, model_path: str) -> list[str]:
    """Return the arguments of the process that reads images, or none for a model of text."""
    if asked_source(model_path, engine) is None:
        return []
    names = engine.tokenizer_path, engine.mmproj, engine.gguf_pre_tokenizer
    return [model_path, *(name or "" for name in names)]


def _chat_rows(config: ServerConfig, templates: ChatTemplates) -> dict[str, str]:
    """Return the summary's rows for chats. Raises `ValueError` for unknown parsers."""
    calls = choose_format(config.tool_call_parser, templates)
    thoughts = choose_reasoning(config.reasoning_parser, templates)
    if templates.default is None:
        return {}
    for tools in (False, True):
        template_reads(templates, tools=tools)  # Cached now, not in the first request.
    rows = {"tool calls": f"{calls.name} (--tool-call-parser)"}
    if config.tool_call_parser == AUTO and (reason := detect(templates).reason):
        rows["tool calls"] = f"{calls.name} (--tool-call-parser): {reason}"
    if thoughts is not None:
        rows["reasoning"] = f"{thoughts.name} (--reasoning-parser)"
    return rows


def _text_service(
    config: ServerConfig,
    tokenizer: Tokenizer,
    defaults: SamplingDefaults,
    rows: dict[str, str],
    images: Sequence[str],
    process: subprocess.Popen[bytes] | None,
) -> Service:
    """`images` are the arguments of the process that reads images, or none for a model of text."""
    settings, refuses = settings_of(config, process), config.sleep_requests == "refuse"
    engine: TextEngine = (
        EngineClient(config.engine, tokenizer, refuses_asleep=refuses, **settings)
        if config.dp_size == 1
        else Replicas(config.dp_size, config.engine, tokenizer, refuses_asleep=refuses, **settings)
    )
    is_chat = tokenizer.chat_template is not None
    media = Media(config, PreprocessProcesses(images)) if images else None
    if media is not None:
        media.start()
    lines = partial(summary, config, rows=rows, chat=is_chat, media=media)
    return Service(engine, create_app(engine, config, defaults, media=media), lines)
