"""Any other pipeline with a transformer: diffusers' pipeline call, whose stages and steps are
measured from outside.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..core.image_params import OF_A_PIPELINE, DiffusionParams, InvalidParams
from .clock import Clock, Stage
from .family import call_defaults, check_size, transformers_of, truncation_warning
from .state import State

# Called with (steps done, steps in all) before each step. An error that it raises ends the work.
Watch = Callable[[int, int], None]
_STAGES = (
    ("encode_prompt", Stage.TEXT_ENCODING),
    ("prepare_latents", Stage.LATENT_PREPARATION),
    ("scheduler.set_timesteps", Stage.TIMESTEP_PREPARATION),
    ("vae.decode", Stage.DECODING),
)


class WholePipeline:
    """Runs one output at a time. Methods without the usual names do not count for a stage."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self._takes = inspect.signature(type(pipeline).__call__).parameters
        if not {"prompt", "num_inference_steps", "generator", "output_type"} <= set(self._takes):
            raise ValueError(
                f"{type(pipeline).__name__} does not turn a prompt into an image or video; this "
                "pipeline cannot be run"
            )
        if needed := _needed_beside_a_prompt(self._takes):
            raise ValueError(
                f"{type(pipeline).__name__} needs {', '.join(needed)} beside a prompt; this "
                "pipeline cannot be run"
            )

    def transformers(self) -> dict[str, torch.nn.Module]:
        return transformers_of(self.pipeline)

    def validate(self, params: DiffusionParams) -> DiffusionParams:
        """Return the parameters with defaults filled in. Raise `InvalidParams` for parameters that
        the pipeline does not have; its own checks run later.
        """
        defaults, chosen = call_defaults(self.pipeline), dict[str, Any]()
        for name in (
            "width",
            "height",
            "num_frames",
            "num_inference_steps",
            "guidance_scale",
            "guidance_scale_2",
        ):
            if getattr(params, name) is None:
                chosen[name] = defaults.get(name)
            elif name not in self._takes and not (name == "num_frames" and params.num_frames == 1):
                raise InvalidParams(
                    name, f"is not a parameter of {type(self.pipeline).__name__}; leave it out"
                )
        check_size(params, self._size_multiple)
        return replace(params, **chosen)

    def run(self, state: State, clock: Clock, watch: Watch) -> None:
        """Run from prompt to pixels. Raise `InvalidParams`, and errors of `watch`."""
        params = state.params
        asked = {
            name: getattr(params, name)
            for name in OF_A_PIPELINE
            if name in self._takes and getattr(params, name) is not None
        }
        # On the host, so that a seed means the same noise on every device.
        generator = torch.Generator().manual_seed(params.seed)
        steps = _Steps(clock, watch, params.num_inference_steps or 0)
        state.warnings += self._truncation_warnings(params)
        with ExitStack() as stack:
            for path, stage in _STAGES:
                stack.enter_context(_timed(self.pipeline, path, clock, stage))
            stack.enter_context(steps.hooked(self.transformers()))
            if "callback_on_step_end" in self._takes:
                asked["callback_on_step_end"] = steps.end
            elif "callback" in self._takes:
                asked["callback"] = steps.end
            if "use_resolution_binning" in self._takes:
                # Use the requested size instead of one near it.
                asked["use_resolution_binning"] = False
            try:
                output = self.pipeline(
                    **asked, generator=generator, output_type="np", return_dict=False
                )[0]
            except ValueError as error:
                raise InvalidParams(
                    None,
                    f"{type(self.pipeline).__name__} refuses the request: "
                    f"{' '.join(str(error).split())}",
                ) from error
        pixels = np.asarray(output, dtype=np.float32)
        # Images come as [1, H, W, 3], videos as [1, F, H, W, 3].
        state.pixels = pixels[0] if pixels.ndim == 5 else pixels

    @property
    def default_area(self) -> int:
        """Pixels of an image of default size, or 0 if the pipeline does not tell."""
        config = next(iter(self.transformers().values())).config
        side = getattr(self.pipeline, "default_sample_size", None) or getattr(
            config, "sample_size", None
        )
        return (side * self._vae_factor) ** 2 if isinstance(side, int) else 0

    @property
    def _vae_factor(self) -> int:
        names = (
            "vae_scale_factor",
            "vae_scale_factor_spatial",
            "vae_spatial_compression_ratio",
            "vae_spatial_scale_factor",
        )
        return next(
            (
                found
                for name in names
                if isinstance(found := getattr(self.pipeline, name, None), int)
            ),
            1,
        )

    @property
    def _size_multiple(self) -> int:
        """The VAE's factor times the pixels of a patch, if the pipeline has them under the usual
        names.
        """
        config = next(iter(self.transformers().values())).config
        patch = getattr(config, "patch_size", None)
        patch = patch[-1] if isinstance(patch, list | tuple) and patch else patch
        return self._vae_factor * (patch if isinstance(patch, int) else 1)

    def _truncation_warnings(self, params: DiffusionParams) -> tuple[str, ...]:
        """Return warnings about encoders that read only a part of the prompt, by the limits of
        their tokenizers and of the pipeline's call.
        """
        limit = call_defaults(self.pipeline).get("max_sequence_length")
        warnings: tuple[str, ...] = ()
        for name, part in self.pipeline.components.items():
            if name.startswith("tokenizer") and isinstance(part, PreTrainedTokenizerBase):
                most = min(
                    part.model_max_length,
                    limit if isinstance(limit, int) else part.model_max_length,
                )
                warnings += truncation_warning(
                    part, params.prompt, most, name.replace("tokenizer", "text_encoder")
                )
        return warnings


def _needed_beside_a_prompt(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return parameters without a default, such as the image to change."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = ("self", "prompt")
    return [
        name
        for name, each in parameters.items()
        if each.default is each.empty and each.kind not in several and name not in known
    ]


class _Steps:
    """Measures denoising steps. A step lasts from its first call of a transformer to the pipeline's
    callback.
    """

    def __init__(self, clock: Clock, watch: Watch, total: int) -> None:
        self._clock = clock
        self._watch = watch
        self._total = total
        self._done = 0
        self._step: Any = None

    @contextmanager
    def hooked(self, transformers: dict[str, torch.nn.Module]) -> Iterator[None]:
        hooks = [
            transformer.register_forward_pre_hook(self._begin)
            for transformer in transformers.values()
        ]
        try:
            yield
        finally:
            self._finish()
            for hook in hooks:
                hook.remove()

    def end(self, *arguments: Any) -> Any:
        """End a step. This is diffusers' `callback_on_step_end`, which must return its last
        argument, or `callback` of older pipelines.
        """
        self._finish()
        self._done += 1
        return arguments[-1]

    def _begin(self, module: torch.nn.Module, arguments: Any) -> None:
        if self._step is None:
            self._watch(self._done, self._total)
            self._step = self._clock.step()
            self._step.__enter__()

    def _finish(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None


@contextmanager
def _timed(pipeline: Any, path: str, clock: Clock, stage: Stage) -> Iterator[None]:
    """Count calls of the pipeline's method at `path` for `stage` inside the block."""
    *owners, name = path.split(".")
    owner = pipeline
    for part in owners:
        owner = getattr(owner, part, None)
    method = getattr(owner, name, None)
    if method is None:
        yield
        return

    # Keep the signature, because pipelines read it to learn what their scheduler supports.
    @functools.wraps(method)
    def timed(*arguments: Any, **named: Any) -> Any:
        with clock.stage(stage):
            return method(*arguments, **named)

    # Set the attribute on the object, so that the class does not change and the attribute can be
    # removed.
    object.__setattr__(owner, name, timed)
    try:
        yield
    finally:
        object.__delattr__(owner, name)
