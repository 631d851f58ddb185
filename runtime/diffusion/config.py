"""The settings of a diffusion engine. Imports nothing heavy, because the module also defines
command-line flags.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..config.engine import DEVICES, DIST_TIMEOUT, MODEL, RANKS
from ..config.options import check_options, check_threads, option

DIFFUSION = "diffusion models"
PRECISIONS = ("auto", "fp32", "fp16", "bf16")
ATTENTION_BACKENDS = (
    "auto",
    "native",
    "native_math",
    "native_efficient",
    "native_flash",
    "native_cudnn",
    "native_npu",
    "flash",
    "flash_3",
    "sage",
    "xformers",
)
_RESOLUTION = re.compile(r"(\d{1,5})x(\d{1,5})")
WARMUP_MODES = ("off", "request", "server")


_POSITIVE = (
    "num_threads", "warmup_steps", "max_batch_size", "max_image_pixels", "num_gpus",
    "ulysses_degree",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionConfig:
    """Settings of one diffusion engine. None means "choose for this machine". Raises `ValueError`
    with a remedy.
    """

    model_path: str = option(
        "",
        "the pipeline: a folder in diffusers' layout (with model_index.json), or a hub id",
        group=MODEL,
        metavar="PATH",
    )
    device: str = option("auto", "where the model runs", group=MODEL, choices=DEVICES)
    num_threads: int | None = option(
        None,
        "compute threads on a CPU; default: one per allowed core, within the CPU quota",
        group=MODEL,
        metavar="N",
    )
    num_gpus: int | None = option(
        None,
        "ranks that make an image together, each with a process and a device; on a CPU they share "
        "the cores; default: --ulysses-degree",
        group=RANKS,
        metavar="N",
    )
    ulysses_degree: int | None = option(
        None,
        "ranks over which a transformer's tokens are split, and for attention its heads; "
        "default: --num-gpus",
        group=RANKS,
        metavar="N",
    )
    dist_timeout: float = option(
        DIST_TIMEOUT,
        "timeout in seconds after which ranks end if another rank does not respond",
        group=RANKS,
        metavar="SECONDS",
    )
    dit_precision: str = option(
        "auto",
        "number format of the transformers and text encoders; auto: as they are stored",
        group=DIFFUSION,
        choices=PRECISIONS,
    )
    vae_precision: str = option(
        "auto",
        "number format of the VAE; auto: as it is stored",
        group=DIFFUSION,
        choices=PRECISIONS,
    )
    attention_backend: str = option(
        "auto",
        "attention backend of the transformers, by diffusers' names; native: chosen by torch, "
        "as with auto, and used if another backend does not run here",
        group=DIFFUSION,
        choices=ATTENTION_BACKENDS,
    )
    dit_cpu_offload: bool = option(
        False,
        "keep the transformers' weights in the CPU's memory, and copy each block's weights to the "
        "device when the block runs",
        group=DIFFUSION,
    )
    text_encoder_cpu_offload: bool = option(
        False, "offload the text encoders' weights, layer by layer", group=DIFFUSION
    )
    vae_cpu_offload: bool = option(
        False, "offload the VAE's weights, layer by layer", group=DIFFUSION
    )
    pin_cpu_memory: bool = option(
        False,
        "pin the memory of offloaded weights, and copy the next block while one runs; no effect "
        "without offloading",
        group=DIFFUSION,
    )
    enable_torch_compile: bool = option(
        False, "compile the transformers with torch.compile", group=DIFFUSION
    )
    regional_compile: bool = option(
        False,
        "compile only the transformers' repeated blocks, each kind once; needs "
        "--enable-torch-compile",
        group=DIFFUSION,
    )
    warmup: bool = option(
        False, "warm up: --warmup-mode request (generate) or server (serve)", group=DIFFUSION
    )
    warmup_mode: str | None = option(
        None,
        "request: run a few steps of the request's shape before it is timed (generate); server: "
        "run the pipeline's default size before the server is ready (serve); default: off, unless "
        "transformers are compiled",
        group=DIFFUSION,
        choices=WARMUP_MODES,
    )
    warmup_resolutions: str | None = option(
        None,
        "sizes that a server warms up before it is ready, such as 1024x1024,512x768; default: the "
        "pipeline's default size",
        group=DIFFUSION,
        metavar="LIST",
        items=r"[\dx,]+",
    )
    warmup_steps: int = option(1, "denoising steps of a warm-up", group=DIFFUSION, metavar="N")
    max_batch_size: int | None = option(
        None,
        "most images or videos of one shape that are denoised together; default: 4, or 1 if "
        "transformers are compiled",
        group=DIFFUSION,
        metavar="N",
    )
    max_image_pixels: int | None = option(
        None,
        "most pixels (width times height) of an image; default: four times the pixels of the "
        "pipeline's default size, at least 1,048,576",
        group=DIFFUSION,
        metavar="N",
    )

    def __post_init__(self) -> None:
        check_options(self, _POSITIVE)
        check_threads(self.num_threads)
        if (
            None not in (self.num_gpus, self.ulysses_degree)
            and self.num_gpus != self.ulysses_degree
        ):
            raise ValueError(
                f"--num-gpus {self.num_gpus} and --ulysses-degree {self.ulysses_degree} disagree: "
                "all ranks share the tokens, so set only one of them"
            )
        if not 1 <= self.dist_timeout < float("inf"):
            raise ValueError(f"--dist-timeout must be at least 1 second, got {self.dist_timeout}")
        if self.dit_cpu_offload and self.enable_torch_compile and not self.regional_compile:
            raise ValueError(
                "--dit-cpu-offload copies block by block, but --enable-torch-compile compiles all "
                "blocks as one; add --regional-compile"
            )
        if self.warmup and self.warmup_mode == "off":
            raise ValueError(
                f"--warmup and --warmup-mode {self.warmup_mode} contradict each other; "
                "omit one of them"
            )
        if self.warmup_resolutions is not None and not self.warms_up:
            raise ValueError("--warmup-resolutions has no effect without a warm-up; add --warmup")
        parse_resolutions(self.warmup_resolutions)
        if self.regional_compile and not self.enable_torch_compile:
            raise ValueError(
                "--regional-compile has no effect without --enable-torch-compile; add it"
            )

    @property
    def num_ranks(self) -> int:
        return self.num_gpus or self.ulysses_degree or 1

    @property
    def warmup_sizes(self) -> list[tuple[int | None, int | None]]:
        """Widths and heights to warm up. None: the pipeline's default size."""
        return [*parse_resolutions(self.warmup_resolutions)] or [(None, None)]

    @property
    def batch_size(self) -> int:
        # Each batch size would be compiled separately.
        return self.max_batch_size or (1 if self.enable_torch_compile else 4)

    @property
    def warms_up(self) -> bool:
        """Whether a warm-up runs before the first request is measured."""
        default = "request" if self.enable_torch_compile else "off"
        return self.warmup or (self.warmup_mode or default) != "off"


def parse_resolutions(text: str | None) -> list[tuple[int, int]]:
    """Return widths and heights in pixels from `1024x1024,512x768`. Raise `ValueError` with a
    remedy.
    """
    sizes = (
        [_RESOLUTION.fullmatch(part.strip()) for part in text.split(",")]
        if text is not None
        else []
    )
    if not all(sizes):
        raise ValueError(
            f"--warmup-resolutions takes widths and heights such as 1024x1024,512x768, got {text!r}"
        )
    return [(int(found[1]), int(found[2])) for found in sizes if found]
