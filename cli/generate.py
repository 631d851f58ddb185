"""`piecework generate`: make images or videos from one prompt, and report the times."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..runtime.diffusion.config import DiffusionConfig
from ..runtime.process.progress import progress_bar
from ..version import __version__
from .core.flags import add_config_arguments, given, report
from .output_config import OutputConfig

if TYPE_CHECKING:
    from ..runtime.diffusion.clock import Clock
    from ..runtime.diffusion.media import Output
    from ..runtime.diffusion.model import DiffusionModel
    from ..runtime.diffusion.state import State
    from ..runtime.distributed.ranks import Ranks

_LAST_WORDS = 2.0  # Seconds to wait for the error of a rank that has exited.


def add_parser(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="make an image or a video from a prompt",
        usage="%(prog)s MODEL --prompt TEXT [flags]",
        description="Run a diffusion pipeline (FLUX.1, Qwen-Image, Wan 2.x, or another pipeline of "
        "diffusers with a transformer) for one prompt, write the outputs, and print the times.",
    )
    generate.add_model_argument()
    generate.add_config_file_argument()
    add_config_arguments(generate, OutputConfig, DiffusionConfig)
    generate.set_defaults(func=_generate, parser=generate)


def _generate(arguments: argparse.Namespace) -> int:
    return generate(
        DiffusionConfig(**given(arguments, DiffusionConfig)),
        OutputConfig(**given(arguments, OutputConfig)),
    )


def generate(config: DiffusionConfig, asked: OutputConfig) -> int:
    """Run the pipeline and return the exit code. Raises `ValueError` for a user error."""
    from ..kernels.collectives import CollectiveError
    from ..runtime.core.image_params import InvalidParams
    from ..runtime.diffusion.clock import Clock
    from ..runtime.diffusion.engine import start_ranks
    from ..runtime.diffusion.media import Output
    from ..runtime.diffusion.model import DiffusionModel
    from ..runtime.diffusion.report import performance_report, table, write_report
    from ..runtime.distributed.ranks import ALONE, RankError

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if config.warmup_resolutions is not None:
        raise ValueError(
            "--warmup-resolutions is for piecework serve; generate warms up its own size"
        )
    if config.max_image_pixels is not None:
        raise ValueError(
            "--max-image-pixels is for piecework serve, and generate has no limit; leave it out"
        )
    # Check everything before loading, which takes minutes.
    _check_report_path(asked.perf_dump_path)
    output = Output(asked.output_path) if asked.save_output else None
    if not config.model_path:
        raise ValueError(
            "--model-path PATH is required: the folder of a pipeline in diffusers' layout"
        )
    ranks: Ranks = ALONE
    try:
        params = asked.params()
        ranks = start_ranks(asdict(config), _end)
        model = DiffusionModel(config, ranks)
        chosen = model.family.validate(params[0])
        if output is not None:
            output.check(chosen.num_frames or 1)
        if config.warms_up:
            print(f"warm-up: {model.warm_up(params[0]):.2f} s", file=sys.stderr)
        start = time.perf_counter()
        clock = Clock(model.platform)
        states = _run(model, params, clock)
        total_ms = (time.perf_counter() - start) * 1000
    except InvalidParams as error:
        message = str(error)
        if error.param is not None:  # Name the flag instead of the parameter.
            message = f"--{error.param.replace('_', '-')}{message.removeprefix(error.param)}"
        raise ValueError(message) from None
    except (RankError, CollectiveError) as error:
        # Let the rank that exited print its error first.
        time.sleep(_LAST_WORDS)
        _end(str(error), ranks)
    finally:
        ranks.close()
    for warning in dict.fromkeys(text for state in states for text in state.warnings):
        print(f"warning: {warning}", file=sys.stderr)
    if output is not None:
        _save(output, states, asked)
    print(
        f"\n{model.architecture}, {model.dtype} on {model.platform.device_type}, loaded in "
        f"{model.load_seconds:.1f} s"
    )
    print(table(clock, total_ms))
    if model.compiled is not None:
        print(f"  compiled              {model.compiled.summary()}")
        for found in dict.fromkeys(model.compiled.log.breaks):
            print(f"  graph break           {found.file}:{found.line}: {found.reason}")
    if asked.perf_dump_path:
        meta = _meta(model, config, states)
        report = performance_report(clock, total_ms, meta, request_id=uuid.uuid4().hex)
        try:
            write_report(Path(asked.perf_dump_path), report)
        except OSError as error:
            raise ValueError(
                f"--perf-dump-path {asked.perf_dump_path} cannot be written: {error.strerror}"
            ) from None
    return 0


def _end(line: str, ranks: Ranks | None = None) -> NoReturn:
    """Exit without the interpreter's shutdown, which would wait for the ranks."""
    report("piecework generate", line)
    if ranks is not None:
        # A stopped rank would not exit by itself.
        ranks.close()
    os._exit(1)


def _run(model: DiffusionModel, params: Sequence[Any], clock: Clock) -> list[State]:
    with progress_bar(desc="denoising", unit="step") as bar:
        last = 0

        def on_step(done: int, total: int) -> None:
            nonlocal last
            # The count restarts at 0 for the next batch of outputs.
            new = done if done < last else done - last
            last = done
            bar.total = max(bar.total or 0, total, bar.n + new)
            bar.update(new)

        return model.generate(params, clock, on_step)


def _save(output: Output, states: Sequence[State], asked: OutputConfig) -> None:
    for number, state in enumerate(states):
        assert state.pixels is not None
        files = output.save(state.pixels, asked.prompt, state.params.seed, number, len(states))
        more = f" and {len(files) - 1} more frames" if len(files) > 1 else ""
        print(f"{files[0]}{more}")


def _meta(
    model: DiffusionModel, config: DiffusionConfig, states: Sequence[State]
) -> dict[str, Any]:
    params = states[0].params
    return {
        "piecework": __version__,
        "model": config.model_path,
        "pipeline": model.architecture,
        "device": model.platform.identity(),
        "dtype": model.dtype,
        "width": params.width,
        "height": params.height,
        "num_frames": params.num_frames,
        "num_inference_steps": params.num_inference_steps,
        "num_outputs": len(states),
        "seed": params.seed,
        "torch_compile": config.enable_torch_compile,
        "regional_compile": config.regional_compile,
        "compile": None if model.compiled is None else model.compiled.report(),
        "load_seconds": model.load_seconds,
    }


def _check_report_path(path: str | None) -> None:
    if path is None:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a"):
            pass
    except OSError as error:
        raise ValueError(f"--perf-dump-path {path} cannot be written: {error.strerror}") from None
