"""Settings of `piecework generate`: what to make, and where to write it."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.config.options import option
from ..runtime.core.image_params import OF_A_PIPELINE, DiffusionParams

_WHAT = "what to make"
_WHERE = "where to write it"
MAX_OUTPUTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """One prompt and its outputs. None means the pipeline's default. Raises `ValueError`."""

    prompt: str = option("", "what the image or video shows", group=_WHAT, metavar="TEXT")
    negative_prompt: str | None = option(
        None,
        "what it must not show; used by pipelines with classifier-free guidance",
        group=_WHAT,
        metavar="TEXT",
    )
    width: int | None = option(None, "pixels; default: the pipeline's", group=_WHAT, metavar="N")
    height: int | None = option(None, "pixels; default: the pipeline's", group=_WHAT, metavar="N")
    num_frames: int | None = option(
        None, "frames of a video; default: the pipeline's", group=_WHAT, metavar="N"
    )
    num_inference_steps: int | None = option(
        None, "denoising steps; default: the pipeline's", group=_WHAT, metavar="N"
    )
    guidance_scale: float | None = option(
        None, "how closely to follow the prompt; default: the pipeline's", group=_WHAT, metavar="F"
    )
    guidance_scale_2: float | None = option(
        None,
        "guidance scale of Wan 2.2's second transformer; default: --guidance-scale",
        group=_WHAT,
        metavar="F",
    )
    seed: int = option(
        42, "seed of the noise; the same seed gives the same pixels", group=_WHAT, metavar="N"
    )
    num_outputs: int = option(
        1, "number of outputs, with the seeds S, S + 1, ...", group=_WHAT, metavar="N"
    )
    output_path: str = option(
        "outputs",
        "folder, or a .png or .mp4 file; a video as .png is written as one file per frame",
        group=_WHERE,
        metavar="PATH",
    )
    save_output: bool = option(True, "write the outputs", group=_WHERE)
    perf_dump_path: str | None = option(
        None,
        "write the durations of stages and steps to this JSON file",
        group=_WHERE,
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ValueError("--prompt TEXT is required: describe the image or video")
        if not 1 <= self.num_outputs <= MAX_OUTPUTS:
            raise ValueError(
                f"--num-outputs must lie between 1 and {MAX_OUTPUTS}, got {self.num_outputs}"
            )

    def params(self) -> list[DiffusionParams]:
        """Return the parameters of each output. Raises `InvalidParams`."""
        asked = {name: getattr(self, name) for name in OF_A_PIPELINE}
        return [
            DiffusionParams(**asked, seed=self.seed + number, group="generate")
            for number in range(self.num_outputs)
        ]
