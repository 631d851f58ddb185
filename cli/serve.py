"""`piecework serve`: serve a language model, a pooling model, a diffusion pipeline or a speech
model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from typing import Any

from ..runtime.config.engine import EngineConfig
from ..runtime.diffusion.config import DiffusionConfig
from ..runtime.pooling.config import PoolingConfig
from ..runtime.process.logs import FORMAT_VARIABLE
from ..runtime.process.parent import ENVIRONMENT
from ..runtime.speech.config import SpeechConfig
from ..server.config.fleet import FleetConfig, FleetLimits
from ..server.config.images import ImageServerConfig
from ..server.config.pooling import PoolingServerConfig
from ..server.config.server import ServerConfig
from ..server.config.speech import SpeechServerConfig
from ..server.engine.spawn import spawned
from ..server.listener import listen
from .core.flags import (
    ArgumentParser,
    add_config_arguments,
    check_model,
    given,
    refuse_flags,
    server_config,
)
from .core.foreign_flags import add_foreign_flags
from .fleet import fleet_config, models_parser

_BEGAN = time.perf_counter()
_TEXT: tuple[type, ...] = (EngineConfig, ServerConfig)
_IMAGES: tuple[type, ...] = (DiffusionConfig, ImageServerConfig)
_POOLING: tuple[type, ...] = (PoolingConfig, PoolingServerConfig)
_SPEECH: tuple[type, ...] = (SpeechConfig, SpeechServerConfig)


def add_parser(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model through the OpenAI API",
        add_help=False,
    )
    describe(serve)
    serve.set_defaults(func=_serve, parser=serve)


def describe(serve: ArgumentParser, *configs: type) -> None:
    """Add the flags of the given configs to a parser, or the flags of all kinds of models."""
    serve.usage = "%(prog)s [MODEL] [flags]"
    serve.description = (
        "Serve a language model (OpenAI's, Anthropic's and SGLang's APIs), an embedder or reranker "
        "(OpenAI's, Cohere's and vLLM's APIs), a diffusion pipeline (a folder with "
        "model_index.json; OpenAI's images API), or a Whisper model (OpenAI's audio API). "
        "Without flags it serves a small language model to this machine only."
    )
    serve.epilog = (
        "`%(prog)s FOLDER --help` shows only the flags for the kind of model in FOLDER. "
        "Flags of vLLM, SGLang and llama.cpp that mean the same work too. "
        "/health answers 503 while the model loads, and 200 when it is ready. "
        "SIGTERM or Ctrl-C lets running requests finish; a second one stops at once."
    )
    serve.add_model_argument()
    serve.add_argument("-h", "--help", action=_ServeHelp, nargs=0, help="show this help and exit")
    serve.add_config_file_argument()
    add_config_arguments(serve, *(configs or (*_TEXT, *_IMAGES, *_POOLING, *_SPEECH, FleetLimits)))
    add_foreign_flags(serve)
    if not configs:
        serve.models = models_parser(serve.instead_of)


class _ServeHelp(argparse.Action):
    """Print the flags for the MODEL before `--help`, or those of a language model."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any
    ) -> None:
        from ..runtime.files.resolve import is_pipeline
        from ..runtime.speech.folder import is_speech

        model = getattr(namespace, "model", getattr(namespace, "model_path", ""))
        shown = ArgumentParser(prog=parser.prog, add_help=False)
        pools = _POOLING if _pools(namespace, model) else _TEXT
        others = _SPEECH if is_speech(model) else pools
        describe(shown, *(_IMAGES if is_pipeline(model) else others))
        shown.print_help()
        parser.exit()


def _serve(arguments: argparse.Namespace) -> int:
    config = fleet_config(arguments, serving_config) or serving_config(arguments)
    # Child processes use the same log format.
    os.environ[FORMAT_VARIABLE] = config.log_format
    if isinstance(config, ServerConfig) and config.engine.node_rank > 0:
        from ..runtime.distributed.node import run_node

        check_model(config.engine)
        return run_node(config.engine, log_level=config.log_level, environment=ENVIRONMENT)
    with contextlib.ExitStack() as listening:
        ports = [(config.port, "--port"), (config.ollama_port, "--ollama-port")]
        listeners = [
            listening.enter_context(listen(config.host, port, flag))
            for port, flag in ports
            if port is not None
        ]
        if isinstance(config, FleetConfig):
            from ..server.launch import serve

            return serve(config, None, listeners, _BEGAN)
        # The engine process imports its modules while this process imports the web stack and
        # reads the tokenizer.
        with spawned(config.engine_command) as process:
            if isinstance(config, ServerConfig):
                check_model(config.engine)
            from ..server.launch import serve

            return serve(config, process, listeners, _BEGAN)


def _pools(arguments: argparse.Namespace, path: str) -> bool:
    """Return whether to serve the model at `path` for vectors or scores."""
    from ..runtime.pooling.folder import makes_vectors

    runner = getattr(arguments, "runner", "auto")
    return runner == "pooling" or (runner == "auto" and makes_vectors(path))


def serving_config(
    arguments: argparse.Namespace,
) -> ServerConfig | ImageServerConfig | PoolingServerConfig | SpeechServerConfig:
    """Return the settings for the kind of model at the model path.

    Raises `ValueError` for a flag of another kind.
    """
    from ..runtime.files.resolve import find_model, is_pipeline
    from ..runtime.speech.folder import is_speech

    model_path = getattr(arguments, "model_path", EngineConfig().model_path)
    found = find_model(model_path)
    if is_pipeline(found):
        refuse_flags(
            arguments,
            (*_TEXT, *_POOLING, *_SPEECH),
            _IMAGES,
            f"is for language models, but {model_path} is a diffusion pipeline",
        )
        return ImageServerConfig(
            engine=DiffusionConfig(**given(arguments, DiffusionConfig)),
            **given(arguments, ImageServerConfig),
        )
    if is_speech(found):
        refuse_flags(
            arguments,
            (*_TEXT, *_POOLING, *_IMAGES),
            _SPEECH,
            f"is for models of other kinds, but {model_path} writes the text of speech",
        )
        return SpeechServerConfig(
            engine=SpeechConfig(**given(arguments, SpeechConfig)),
            **given(arguments, SpeechServerConfig),
        )
    refuse_flags(arguments, _SPEECH, _TEXT, f"is for speech models, but {model_path} is not one")
    refuse_flags(
        arguments, _IMAGES, _TEXT, f"is for diffusion pipelines, but {model_path} is not one"
    )
    if _pools(arguments, found):
        from ..runtime.pooling.folder import read_folder

        refuse_flags(
            arguments,
            _TEXT,
            _POOLING,
            f"is for generating text, but {model_path} makes vectors or scores",
        )
        read_folder(found)
        return PoolingServerConfig(
            engine=PoolingConfig(**given(arguments, PoolingConfig)),
            **given(arguments, PoolingServerConfig),
        )
    return server_config(arguments)
