"""A loaded diffusion pipeline and its stages, for the command line and the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...compilation.regional import CompiledModels
from ...kernels.platform.detect import detect
from ...kernels.platform.device import Place
from ..core.image_params import DiffusionParams, InvalidParams
from ..distributed.ranks import ALONE, Ranks
from ..files.resolve import find_model
from .attention import choose_attention
from .clock import Clock, Stage
from .config import DiffusionConfig
from .family import Family
from .flux import Flux
from .loading import load_pipeline, read_index
from .offload import check_offload, offload
from .qwen_image import QwenImage
from .state import State, Text
from .ulysses import collective_errors, split_tokens
from .wan import Wan
from .whole_pipeline import WholePipeline

# Pipelines whose stages are run one by one. Other pipelines run as a whole.
FAMILIES: dict[str, type[Family]] = {
    "FluxPipeline": Flux,
    "QwenImagePipeline": QwenImage,
    "WanPipeline": Wan,
}
_AREA_FACTOR = 4  # Default limit of pixels, as a multiple of the default area.
# Pixels. The work of attention grows with their square, and a step cannot be interrupted.
_LEAST_AREA = 2**20
# Called with (steps done, steps in all) before each denoising step and after the last.
OnStep = Callable[[int, int], None]


class OutOfMemory(ValueError):
    """The device has too little memory for an output."""


def check_ranks(folder: Path, ranks: int) -> None:
    """Raise `ValueError` if `ranks` ranks cannot share the pipeline in `folder`. Nothing is loaded
    yet.
    """
    architecture = read_index(folder)["_class_name"]
    kind = FAMILIES.get(architecture)
    if kind is None:
        raise ValueError(
            f"--ulysses-degree supports {', '.join(FAMILIES)}, but {folder} holds a "
            f"{architecture}; omit it"
        )
    kind.check_ranks(folder, ranks)


class DiffusionModel:
    """Loads a pipeline. Then call `prepare`, `denoise` until the state is denoised, and `decode`,
    or `generate` for all of them.

    Every rank has the whole model and the same states, and computes its part of the tokens. Raises
    `ValueError` for faults that the user can repair.
    """

    def __init__(self, config: DiffusionConfig, ranks: Ranks = ALONE) -> None:
        start = time.perf_counter()
        self.config, self.ranks = config, ranks
        self.platform = detect(config.device)
        self.platform.set_up(config.num_threads, Place(ranks.local_rank, ranks.local_size))
        self.platform.use_device(ranks.local_rank)
        check_offload(config, self.platform)
        folder = Path(find_model(config.model_path))
        self.pipeline: Any = load_pipeline(folder, config, self.platform)
        self.architecture = type(self.pipeline).__name__
        kind = FAMILIES.get(self.architecture)
        self.family: Family | WholePipeline = (
            kind(self.pipeline, self.platform.device(), ranks.size)
            if kind
            else WholePipeline(self.pipeline)
        )
        self._encoded: tuple[tuple[str, str], Text] | None = None
        self.compiled: CompiledModels | None = None
        if config.enable_torch_compile:
            self.compiled = CompiledModels(
                self.family.transformers(), self.platform, regional=config.regional_compile
            )
        if ranks.size > 1:
            ranks.gather_objects(None)
            self.platform.groups_of_torch = True
            ranks.make_group(self.platform)
            # Split tokens after compiling, because splitting and gathering happen outside of
            # compiled code.
            split_tokens(self.family.transformers(), self.platform.device_type)
        choose_attention(
            self.family.transformers(),
            config.attention_backend,
            self.platform,
            masked=kind is QwenImage and (ranks.size > 1 or config.batch_size > 1),
        )
        offload(self.pipeline, config, self.platform)
        self.platform.give_back_memory()
        self.load_seconds = time.perf_counter() - start

    @property
    def stepwise(self) -> bool:
        """Whether states can be denoised together, step by step."""
        return isinstance(self.family, Family)

    def call_on_each_block(self, callback: Callable[[], None]) -> None:
        """Set a function that is called before each block of the pipeline's models: the step is
        alive.
        """
        parts = [
            part for part in self.pipeline.components.values() if isinstance(part, torch.nn.Module)
        ]
        for blocks in {
            module
            for part in parts
            for module in part.modules()
            if isinstance(module, torch.nn.ModuleList)
        }:
            for block in blocks:
                block.register_forward_pre_hook(lambda *_: callback())

    def check_area(self, params: DiffusionParams) -> None:
        """Raise `InvalidParams` for an image with a step that would block a server for
        very long.
        """
        most = self.config.max_image_pixels or max(
            _LEAST_AREA, _AREA_FACTOR * self.family.default_area
        )
        area = (params.width or 0) * (params.height or 0)
        if area > most:
            remedy = "ask for a smaller size, or start the server with a larger --max-image-pixels"
            raise InvalidParams(
                "width",
                f"times height is {area:,} pixels, more than the {most:,} that this server makes; "
                f"{remedy}",
            )

    @property
    def weight_bytes(self) -> int:
        parts = [
            part for part in self.pipeline.components.values() if isinstance(part, torch.nn.Module)
        ]
        return sum(
            weight.numel() * weight.element_size()
            for part in parts
            for weight in (*part.parameters(), *part.buffers())
        )

    @property
    def dtype(self) -> str:
        return str(next(iter(self.family.transformers().values())).dtype).removeprefix("torch.")

    def validate(self, params: DiffusionParams, clock: Clock) -> State:
        """Return the state of a valid request. Raise `InvalidParams`."""
        with clock.stage(Stage.INPUT_VALIDATION):
            return State(params=self.family.validate(params))

    @torch.no_grad()
    def prepare(self, state: State, clock: Clock) -> None:
        """Run the stages between validation and denoising."""
        assert isinstance(self.family, Family)
        with self._memory_errors(), clock.stage(Stage.TEXT_ENCODING):
            state.text = self._encode(state.params)
            state.warnings += state.text.warnings
        with self._memory_errors(), clock.stage(Stage.LATENT_PREPARATION):
            # On the host, so that a seed means the same noise on every device.
            generator = torch.Generator().manual_seed(state.params.seed)
            state.latents = self.family.draw_latents(state.params, generator)
        with clock.stage(Stage.TIMESTEP_PREPARATION):
            state.scheduler = self.family.new_scheduler()
            self.family.set_timesteps(state.scheduler, state)
            state.scheduler.set_begin_index(0)
            state.timesteps = state.scheduler.timesteps

    @torch.no_grad()
    def denoise(self, states: Sequence[State], clock: Clock) -> None:
        """Run one step of each of `states`, which have one shape."""
        assert isinstance(self.family, Family)
        with self._memory_errors(), clock.step():
            noise = self.predict(states)
            for row, state in enumerate(states):
                state.latents = state.scheduler.step(
                    noise[row : row + 1], state.timestep, state.latents, return_dict=False
                )[0]
                state.step += 1

    @torch.no_grad()
    def decode(self, state: State, clock: Clock) -> None:
        """Decode on rank 0, which alone sends the answer."""
        assert isinstance(self.family, Family)
        if self.ranks.rank != 0:
            state.pixels = np.zeros((1, 1, 1, 3), np.float32)
            return
        with self._memory_errors(), clock.stage(Stage.DECODING):
            state.pixels = np.clip(self.family.decode(state), 0.0, 1.0)

    def generate(
        self, params: Sequence[DiffusionParams], clock: Clock, on_step: OnStep
    ) -> list[State]:
        """Return all outputs of one request, computing as many together as the configuration
        allows.

        Raise `InvalidParams`, `OutOfMemory`, and errors of `on_step`.
        """
        states = [self.validate(each, clock) for each in params]
        self.ranks.call("generate", params)
        if not isinstance(self.family, Family):
            for state in states:
                self.make_whole(self.family, state, clock, on_step)
                steps = state.params.num_inference_steps or 0
                on_step(steps, steps)
            return states
        width = self.config.batch_size
        for first in range(0, len(states), width):
            self._generate_together(states[first : first + width], clock, on_step)
        return states

    def make_whole(
        self, family: WholePipeline, state: State, clock: Clock, on_step: OnStep
    ) -> None:
        """Run all stages after validation in one call. If a compiler fails, start again without it,
        as in `predict`.

        Raise `InvalidParams`, `OutOfMemory`, and errors of `on_step`.
        """
        with self._memory_errors():
            try:
                family.run(state, clock, on_step)
            except Exception as error:
                if self.compiled is None or not self.compiled.give_up(error):
                    raise
                family.run(state, clock, on_step)
        if self.compiled is not None:
            self.compiled.settle()

    def warm_up(self, params: DiffusionParams, num_outputs: int = 1) -> float:
        """Run a request's shape through `--warmup-steps` steps. Return the seconds."""
        start = time.perf_counter()
        least = self.family.min_steps if isinstance(self.family, Family) else 1
        few = replace(params, num_inference_steps=max(least, self.config.warmup_steps), group="")
        self.generate([few] * num_outputs, Clock(self.platform), lambda done, total: None)
        if self.compiled is not None:
            self.compiled.settle()
        return time.perf_counter() - start

    def predict(self, states: Sequence[State]) -> torch.Tensor:
        """Return the noise prediction of the next step for each state: [len(states), ...].

        States do not change, so if a compiler fails, the forward can be tried again without it.
        Raise `CollectiveError` if a rank is missing.
        """
        assert isinstance(self.family, Family)
        with collective_errors():
            try:
                noise = self.family.predict(states)
            except Exception as error:
                if self.compiled is None or not self.compiled.give_up(error):
                    raise
                noise = self.family.predict(states)
        if self.compiled is not None:
            self.compiled.settle()
        return noise

    def _generate_together(self, states: Sequence[State], clock: Clock, on_step: OnStep) -> None:
        for state in states:
            self.prepare(state, clock)
        total = states[0].num_steps
        while not states[0].denoised:
            on_step(states[0].step, total)
            self.denoise(states, clock)
        on_step(total, total)
        for state in states:
            self.decode(state, clock)

    def give_back_memory(self) -> None:
        """Return unused memory on every rank. Call this when there is no work."""
        self.ranks.call("give_back_memory")
        self.platform.give_back_memory()

    @contextmanager
    def _memory_errors(self) -> Iterator[None]:
        """Raise `OutOfMemory` for a failed allocation, after freeing the memory of what failed."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not self.platform.is_out_of_memory(error):
                raise
            remedy = (
                "ask for a smaller width, height or num_frames, or start with --dit-precision "
                "bf16 --vae-precision bf16"
            )
            failure = OutOfMemory(f"the device is out of memory; {remedy}")
        else:
            return
        self.platform.empty_cache()
        raise failure

    def _encode(self, params: DiffusionParams) -> Text:
        """Return encoded prompts. Outputs of one request share them."""
        assert isinstance(self.family, Family)
        key = (params.group, repr((params.prompt, params.negative_prompt, params.guidance_scale)))
        if params.group and self._encoded is not None and self._encoded[0] == key:
            return self._encoded[1]
        text = self.family.encode_text(params)
        self._encoded = (key, text)
        return text
