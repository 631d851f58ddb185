"""The forms of `POST /v1/audio/transcriptions` and `POST /v1/audio/translations`.

Names and meanings are those of https://platform.openai.com/docs/api-reference/audio. `seed` is
named as in vLLM.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator
from starlette.datastructures import FormData

from ..core.errors import from_validation
from ..core.schemas import Seed, WireModel, disagreement, only

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
MAX_PROMPT = 4096  # Characters. A model reads at most 223 tokens, the last ones.
_LISTS = ("timestamp_granularities", "include")


class AudioForm(WireModel):
    """The fields of both forms. A form has only texts, so numbers are parsed."""

    model_config = ConfigDict(
        strict=False, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )
    model: str | None = None
    prompt: Annotated[str, Field(max_length=MAX_PROMPT)] = ""
    response_format: Format = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Seed = 0


class TranscriptionForm(AudioForm):
    """The fields of a transcription."""

    language: str | None = None
    timestamp_granularities: Annotated[
        list[Literal["word", "segment"]], Field(default_factory=lambda: ["segment"])
    ]
    stream: bool = False
    include: Annotated[Any, only(remedy="log-probabilities are in verbose_json")] = None
    chunking_strategy: Annotated[
        Any, only("auto", remedy="audio is always cut in its pauses; leave it out")
    ] = None
    known_speaker_names: Annotated[Any, only(remedy="speakers are not told apart")] = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if "word" in self.timestamp_granularities and self.response_format != "verbose_json":
            raise disagreement(
                "timestamp_granularities",
                "times of words are in verbose_json only; set response_format to verbose_json",
            )
        if self.stream and self.response_format not in ("json", "text"):
            raise disagreement(
                "response_format", "a stream has json or text; set response_format to json"
            )
        return self

    @property
    def words(self) -> bool:
        return "word" in self.timestamp_granularities


def read_form(kind: type[AudioForm], form: FormData) -> Any:
    """Return the fields of a form. Raises `InvalidRequest`."""
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        name = name.removesuffix("[]")
        if name == "file":
            continue
        if name in _LISTS:
            fields.setdefault(name, []).append(value)
        elif value != "":  # Clients send empty fields for values that are not set.
            fields[name] = value
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error.errors()) from None
