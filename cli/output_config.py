"""What `piecework generate` is asked to make, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.config.options import option
from ..runtime.core.image_params import OF_A_PIPELINE, DiffusionParams

_WHAT = "what to make"
_WHERE = "where it goes"
MAX_OUTPUTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """One prompt and its outputs. None means the pipeline's default. Raises `ValueError` with a
    remedy.
    """

    prompt: str = option("", "what to draw", group=_WHAT, metavar="TEXT")
    negative_prompt: str | None = option(
        None,
        "what not to draw; pipelines with classifier-free guidance use it",
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
        "the same for the second transformer of Wan 2.2; default: --guidance-scale",
        group=_WHAT,
        metavar="F",
    )
    seed: int = option(
        42, "seed of the noise; the same seed gives the same pixels", group=_WHAT, metavar="N"
    )
    num_outputs: int = option(
        1, "outputs, with the seeds N, N + 1 and so on", group=_WHAT, metavar="N"
    )
    output_path: str = option(
        "outputs",
        "a folder, or a file that ends in .png or .mp4; a video as .png is written frame by frame",
        group=_WHERE,
        metavar="PATH",
    )
    save_output: bool = option(True, "write the outputs", group=_WHERE)
    perf_dump_path: str | None = option(
        None, "write durations of stages and steps to this JSON file", group=_WHERE, metavar="FILE"
    )

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ValueError("--prompt TEXT is required: say what to draw")
        if not 1 <= self.num_outputs <= MAX_OUTPUTS:
            raise ValueError(
                f"--num-outputs must lie between 1 and {MAX_OUTPUTS}, got {self.num_outputs}"
            )

    def params(self) -> list[DiffusionParams]:
        """One for each output. Raises `InvalidParams`."""
        asked = {name: getattr(self, name) for name in OF_A_PIPELINE}
        return [
            DiffusionParams(**asked, seed=self.seed + number, group="generate")
            for number in range(self.num_outputs)
        ]
