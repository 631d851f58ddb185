"""The `piecework` command: reads the command line, then imports what the chosen command needs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..runtime.config import EngineConfig
from ..runtime.diffusion.config import DiffusionConfig
from ..server.api_key import take_api_key
from .flags import EXIT_USER_ERROR, ArgumentParser, ServerConfig, add_config_arguments, engine_config, given, refuse_flags, report, server_config
from ..server.engine.spawn import DIFFUSION_PIPELINE, LANGUAGE_MODEL, spawned
from .foreign_flags import add_foreign_flags
from ..server.images.config import ImageServerConfig
from .output_config import OutputConfig

_BEGAN = time.perf_counter()
EXIT_INTERRUPTED = 130
_TEXT: tuple[type, ...] = (EngineConfig, ServerConfig)
_IMAGES: tuple[type, ...] = (DiffusionConfig, ImageServerConfig)
_SHOTS = 5
"""Worked examples before each question, as in `piecework bench gsm8k`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, or 2 where the user can mend it, 1 where something broke."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    chosen = getattr(arguments, "parser", parser)
    chosen.settle(arguments, unknown)
    if "func" not in arguments:
        chosen.print_help(sys.stderr)
        return EXIT_USER_ERROR
    try:
        code: int = arguments.func(arguments)
        return code
    except ValueError as error:
        return report(chosen.prog, error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def build_parser() -> ArgumentParser:
    """Every command that exists. Needs neither torch nor the web stack, so that `--help` comes at once."""
    parser = ArgumentParser(prog="piecework", description="An OpenAI-compatible server for language models.")
    parser.add_argument("--version", action="version", version=f"piecework {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_serve(commands)
    _add_generate(commands)
    _add_explain(commands)
    _add_cache(commands)
    _add_bench(commands)
    version = commands.add_parser("version", help="print the versions of piecework and of what it runs on")
    version.set_defaults(func=_version, parser=version)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", help="serve a language model or a diffusion pipeline through the OpenAI API", add_help=False)
    _describe_serve(serve, *_TEXT, *_IMAGES)
    serve.set_defaults(func=_serve, parser=serve)


def _describe_serve(serve: ArgumentParser, *configs: type) -> None:
    serve.usage = "%(prog)s [MODEL] [flags]"
    serve.description = (
        "Serve a language model through the OpenAI API and SGLang's native one, or a diffusion pipeline (a folder with model_index.json) "
        "through OpenAI's images API. Without flags: a small language model on this machine only."
    )
    serve.epilog = (
        "`%(prog)s FOLDER --help` shows the flags for what FOLDER holds: a language model or a diffusion pipeline. "
        "Flags of vLLM and SGLang that mean the same are understood too. "
        "The server answers /health with 503 while the model loads, and with 200 once it is ready. "
        "SIGTERM or Ctrl-C lets running requests finish; a second one ends at once."
    )
    serve.add_model_argument()
    serve.add_argument("-h", "--help", action=_ServeHelp, nargs=0, help="show this and end")
    add_config_arguments(serve, *configs)
    add_foreign_flags(serve)


class _ServeHelp(argparse.Action):
    """Shows only the flags for what MODEL before `--help` is; for a language model where there is none."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
        from ..runtime.loader.resolve import is_pipeline

        model = getattr(namespace, "model", getattr(namespace, "model_path", ""))
        shown = ArgumentParser(prog=parser.prog, add_help=False)
        _describe_serve(shown, *(_IMAGES if is_pipeline(model) else _TEXT))
        shown.print_help()
        parser.exit()


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="make an image or a video from a prompt",
        usage="%(prog)s MODEL --prompt TEXT [flags]",
        description="Run a diffusion pipeline (FLUX.1, Qwen-Image, Wan 2.x, or another of diffusers' with a transformer) for one prompt, "
        "write what it made, and say where the time went.",
    )
    generate.add_model_argument()
    add_config_arguments(generate, OutputConfig, DiffusionConfig)
    generate.set_defaults(func=_generate, parser=generate)


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="show what becomes of a model: its pieces, sizes, times, memory and padding",
        usage="%(prog)s [MODEL] [flags]",
        description="Cut a model's forward as `serve --piecewise-cuda-graph` does, and show its distinct pieces, where it is cut, what "
        "compiling and capturing takes, and what lists of sizes waste on padding. Takes serve's flags of model, memory and graphs. "
        "Starts no server; what it compiles is in the cache for the next one.",
    )
    shown = explain.add_argument_group("what is shown")
    shown.add_argument("--json", action="store_true", help="print JSON instead of tables")
    shown.add_argument("--svg", metavar="FILE", help="draw the cut forward into FILE")
    source = shown.add_mutually_exclusive_group()
    source.add_argument(
        "--lengths",
        metavar="FILE",
        help="compute padding on these numbers of tokens; default: the lengths that servers of this model have seen",
    )
    source.add_argument("--dataset", choices=["gsm8k"], help="compute padding on the prompts of a data set")
    shown.add_argument("--data-path", metavar="FILE", help="the data set's file; default: downloaded once")
    explain.add_model_argument()
    add_config_arguments(explain, EngineConfig)
    add_foreign_flags(explain)
    explain.set_defaults(func=_explain, parser=explain)


def _add_cache(commands: Any) -> None:
    cache = commands.add_parser(
        "cache",
        help="show, clear or move what was compiled, on disk",
        description="The compiled pieces that servers of this machine share: in ~/.cache/piecework, or where PIECEWORK_CACHE_DIR says.",
    )
    cache.set_defaults(parser=cache)
    actions = cache.add_subparsers(title="actions", metavar="ACTION")
    listing = actions.add_parser("ls", help="list the entries: what, of which model, how large, how old")
    listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
    actions.add_parser("clear", help="remove all that was compiled; the next start compiles anew")
    export = actions.add_parser("export", help="write every entry (pieces and plans) into one file, for a machine of the same kind")
    export.add_argument("file", metavar="FILE", help="a .tar.gz")
    importing = actions.add_parser("import", help="take the entries of a file that export wrote; their code is run, so it must be trusted")
    importing.add_argument("file", metavar="FILE")
    for name, parser in actions.choices.items():
        parser.set_defaults(func=_cache, parser=parser, action=name)


def _add_bench(commands: Any) -> None:
    from .bench import add_bench_parsers

    bench = commands.add_parser(
        "bench", help="measure a server", description="Measure any OpenAI-compatible server: what it answers, how fast, and what it leaks."
    )
    bench.set_defaults(parser=bench)
    add_bench_parsers(bench.add_subparsers(title="measurements", metavar="MEASUREMENT"))


def _serve(arguments: argparse.Namespace) -> int:
    key = take_api_key(os.environ)
    if key is not None and not {"api_key", "api_key_file"} & vars(arguments).keys():
        arguments.api_key = key
    config = _serving_config(arguments)
    # While it imports what engines need, this process imports the web stack, and reads the tokenizer.
    with spawned(LANGUAGE_MODEL if isinstance(config, ServerConfig) else DIFFUSION_PIPELINE) as process:
        if isinstance(config, ServerConfig):
            _check_model(config.engine)
        from ..server.launch import serve

        return serve(config, process, _BEGAN)


def _serving_config(arguments: argparse.Namespace) -> ServerConfig | ImageServerConfig:
    """The settings for what the model path holds. Raises `ValueError` for flags that are for something else."""
    from ..runtime.loader.resolve import find_model, is_pipeline

    model_path = getattr(arguments, "model_path", EngineConfig().model_path)
    if is_pipeline(find_model(model_path)):
        refuse_flags(arguments, _TEXT, _IMAGES, f"is for language models, and {model_path} holds a diffusion pipeline")
        return ImageServerConfig(engine=DiffusionConfig(**given(arguments, DiffusionConfig)), **given(arguments, ImageServerConfig))
    refuse_flags(arguments, _IMAGES, _TEXT, f"is for diffusion pipelines, and {model_path} holds none")
    return server_config(arguments)


def _check_model(config: EngineConfig) -> None:
    """Raises `ValueError` where the model cannot be served, before seconds of imports and minutes of loading."""
    from ..runtime.loader.check import check_model
    from ..runtime.loader.resolve import resolve_model_path

    check_model(resolve_model_path(config.model_path), context_length=config.context_length, weights=config.load_format != "dummy")


def _generate(arguments: argparse.Namespace) -> int:
    config, output = DiffusionConfig(**given(arguments, DiffusionConfig)), OutputConfig(**given(arguments, OutputConfig))
    from .generate import generate

    return generate(config, output)


def _explain(arguments: argparse.Namespace) -> int:
    _check_model(engine_config(arguments))
    prompts = None
    if arguments.dataset is not None:
        from ..bench.datasets import few_shot_prompts, load_gsm8k

        questions = load_gsm8k(arguments.data_path)
        prompts = few_shot_prompts(questions, _SHOTS, len(questions))
    elif arguments.data_path is not None:
        raise ValueError("--data-path goes with --dataset")
    from .explain import run

    return run(arguments, prompts)


def _cache(arguments: argparse.Namespace) -> int:
    from .compile_cache import run

    return run(arguments)


def _version(arguments: argparse.Namespace) -> int:
    from importlib.metadata import version

    python = ".".join(map(str, sys.version_info[:3]))
    print(f"piecework {__version__} (python {python}, torch {version('torch')}, transformers {version('transformers')})")
    return 0
