"""The parameters of one image or video."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STEPS = 1000  # Noise levels of the schedulers, which were trained with that many.
MAX_SIDE = 8192
MAX_FRAMES = 1000
MAX_PROMPT = 100_000  # Characters.
# The parameters that a pipeline takes, by the names of diffusers' arguments.
OF_A_PIPELINE = (
    "prompt", "negative_prompt", "width", "height", "num_frames", "num_inference_steps",
    "guidance_scale", "guidance_scale_2",
)  # fmt: skip


class InvalidParams(ValueError):
    """A parameter that cannot be served.

    The message begins with its name, `param`, unless the pipeline did not say which one it is.
    """

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message if param is None else f"{param} {message}")
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionParams:
    """The parameters of one output. The same parameters give the same pixels.

    Sizes are in pixels. None means the pipeline's default. Outputs with the same `group` belong to
    one request, and their prompts are encoded once. Raises `InvalidParams`.
    """

    prompt: str
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    seed: int = 0
    group: str = ""

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise InvalidParams("prompt", "is empty; say what to draw")
        for name in ("prompt", "negative_prompt"):
            _check_text(name, getattr(self, name) or "")
        for name, most in (
            ("width", MAX_SIDE),
            ("height", MAX_SIDE),
            ("num_frames", MAX_FRAMES),
            ("num_inference_steps", MAX_STEPS),
        ):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise InvalidParams(name, f"must lie between 1 and {most}, got {value}")
        for name in ("guidance_scale", "guidance_scale_2"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 100.0:
                raise InvalidParams(name, f"must lie between 0 and 100, got {value}")
        if not -(2**63) <= self.seed < 2**64:
            raise InvalidParams("seed", f"must fit 64 bits, got {self.seed}")


def _check_text(name: str, text: str) -> None:
    if len(text) > MAX_PROMPT:
        raise InvalidParams(name, f"has more than {MAX_PROMPT:,} characters; shorten it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParams(
            name, f"is not valid Unicode at character {error.start}; send whole characters in UTF-8"
        ) from None
