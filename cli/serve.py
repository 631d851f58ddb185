"""`piecework serve`: one server for what the model path holds."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from ..runtime.config.engine import EngineConfig
from ..runtime.diffusion.config import DiffusionConfig
from ..runtime.pooling.config import PoolingConfig
from ..runtime.process.logs import FORMAT_VARIABLE
from ..runtime.process.parent import ENVIRONMENT
from ..server.config.server import ServerConfig
from ..server.engine.spawn import spawned
from ..server.fleet.config import FleetConfig, FleetLimits
from ..server.images.config import ImageServerConfig
from ..server.listener import listen
from ..server.pooling.config import PoolingServerConfig
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


def add_parser(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a language model or a diffusion pipeline through the OpenAI API",
        add_help=False,
    )
    describe(serve)
    serve.set_defaults(func=_serve, parser=serve)


def describe(serve: ArgumentParser, *configs: type) -> None:
    """Give a parser the flags of a server, those of all kinds of models where none is named."""
    serve.usage = "%(prog)s [MODEL] [flags]"
    serve.description = (
        "Serve a language model through the OpenAI API and SGLang's native one, an embedder or a "
        "reranker through OpenAI's, Cohere's and vLLM's, or a diffusion pipeline (a folder with "
        "model_index.json) through OpenAI's images API. Without flags: a small language model on "
        "this machine only."
    )
    serve.epilog = (
        "`%(prog)s FOLDER --help` shows the flags for what FOLDER holds: a language model, an "
        "embedder or reranker, or a diffusion pipeline. "
        "Flags of vLLM and SGLang that mean the same are understood too. "
        "The server answers /health with 503 while the model loads, and with 200 once it is ready. "
        "SIGTERM or Ctrl-C lets running requests finish; a second one ends at once."
    )
    serve.add_model_argument()
    serve.add_argument("-h", "--help", action=_ServeHelp, nargs=0, help="show this and end")
    serve.add_config_file_argument()
    add_config_arguments(serve, *(configs or (*_TEXT, *_IMAGES, *_POOLING, FleetLimits)))
    add_foreign_flags(serve)
    if not configs:
        serve.models = models_parser(serve.instead_of)


class _ServeHelp(argparse.Action):
    """Shows only the flags for what MODEL before `--help` is; for a language model where there is
    none.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any
    ) -> None:
        from ..runtime.files.resolve import is_pipeline

        model = getattr(namespace, "model", getattr(namespace, "model_path", ""))
        shown = ArgumentParser(prog=parser.prog, add_help=False)
        pools = _POOLING if _pools(namespace, model) else _TEXT
        describe(shown, *(_IMAGES if is_pipeline(model) else pools))
        shown.print_help()
        parser.exit()


def _serve(arguments: argparse.Namespace) -> int:
    config = fleet_config(arguments, serving_config) or serving_config(arguments)
    # All processes of the server log alike.
    os.environ[FORMAT_VARIABLE] = config.log_format
    if isinstance(config, ServerConfig) and config.engine.node_rank > 0:
        from ..runtime.distributed.node import run_node

        check_model(config.engine)
        return run_node(config.engine, log_level=config.log_level, environment=ENVIRONMENT)
    with listen(config.host, config.port) as listener:
        if isinstance(config, FleetConfig):
            from ..server.launch import serve

            return serve(config, None, listener, _BEGAN)
        # While it imports what engines need, this process imports the web stack, and reads the
        # tokenizer.
        with spawned(config.engine_command) as process:
            if isinstance(config, ServerConfig):
                check_model(config.engine)
            from ..server.launch import serve

            return serve(config, process, listener, _BEGAN)


def _pools(arguments: argparse.Namespace, path: str) -> bool:
    """Whether the model at a path is to make vectors or scores."""
    from ..runtime.pooling.folder import makes_vectors

    runner = getattr(arguments, "runner", "auto")
    return runner == "pooling" or (runner == "auto" and makes_vectors(path))


def serving_config(
    arguments: argparse.Namespace,
) -> ServerConfig | ImageServerConfig | PoolingServerConfig:
    """The settings for what the model path holds. Raises `ValueError` for flags that are for
    something else.
    """
    from ..runtime.files.resolve import find_model, is_pipeline

    model_path = getattr(arguments, "model_path", EngineConfig().model_path)
    found = find_model(model_path)
    if is_pipeline(found):
        refuse_flags(
            arguments,
            (*_TEXT, *_POOLING),
            _IMAGES,
            f"is for language models, and {model_path} holds a diffusion pipeline",
        )
        return ImageServerConfig(
            engine=DiffusionConfig(**given(arguments, DiffusionConfig)),
            **given(arguments, ImageServerConfig),
        )
    refuse_flags(
        arguments, _IMAGES, _TEXT, f"is for diffusion pipelines, and {model_path} holds none"
    )
    if _pools(arguments, found):
        from ..runtime.pooling.folder import read_folder

        refuse_flags(
            arguments, _TEXT, _POOLING, f"is for writing text, and {model_path} makes vectors"
        )
        read_folder(found)
        return PoolingServerConfig(
            engine=PoolingConfig(**given(arguments, PoolingConfig)),
            **given(arguments, PoolingServerConfig),
        )
    return server_config(arguments)
