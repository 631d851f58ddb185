"""Reads what a folder says of a Whisper model, without its weights.

Source of the formats: config.json and generation_config.json of openai/whisper-*, and transformers
5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.folder import read_json

ARCHITECTURE = "WhisperForConditionalGeneration"
_FRAMES_PER_SECOND = 100  # The spectrogram has these. The encoder has half of them.
_SIZES = (
    *("d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads"),
    *("decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "num_mel_bins"),
    *("max_source_positions", "max_target_positions", "vocab_size"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperSizes:
    """The shape of the model, by the names of config.json."""

    d_model: int
    encoder_layers: int
    decoder_layers: int
    encoder_attention_heads: int
    decoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_ffn_dim: int
    num_mel_bins: int
    max_source_positions: int
    max_target_positions: int
    vocab_size: int
    activation_function: str = "gelu"
    median_filter_width: int = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechFolder:
    """What a folder says of a Whisper model.

    Attributes:
        start, end, no_timestamps: Ids of tokens.
        languages: Ids of the tokens of languages by their codes. Empty if the model knows only
            English.
        tasks: Ids of the tokens of tasks. Empty if the model knows only English.
        suppressed, suppressed_first: Ids of tokens that are never written, and those that are not
            written first.
        latest_start: The number of the last timestamp that may come first, or None.
        alignment_heads: Layers and heads whose cross-attention follows the audio.
    """

    path: Path
    sizes: WhisperSizes
    start: int
    end: int
    no_timestamps: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    suppressed: list[int]
    suppressed_first: list[int]
    latest_start: int | None
    alignment_heads: list[tuple[int, int]]

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        return self.no_timestamps - 1

    @property
    def window_frames(self) -> int:
        return 2 * self.sizes.max_source_positions

    @property
    def window_seconds(self) -> int:
        return self.window_frames // _FRAMES_PER_SECOND


def is_speech(path: str) -> bool:
    """Return whether a folder holds a Whisper model. False if its files do not tell."""
    try:
        return bool(read_json(Path(path) / "config.json")["architectures"][0] == ARCHITECTURE)
    except (ValueError, KeyError, TypeError, IndexError):
        return False


def read_speech_folder(path: str) -> SpeechFolder:
    """Return what a folder holds. Raises `ValueError` that names the file at fault."""
    folder = Path(path)
    sizes = _sizes(folder / "config.json")
    file = folder / "generation_config.json"
    content = read_json(file)
    try:
        found = SpeechFolder(
            path=folder,
            sizes=sizes,
            start=_token(content, "decoder_start_token_id"),
            end=_token(content, "eos_token_id"),
            no_timestamps=_token(content, "no_timestamps_token_id"),
            languages={
                str(name)[2:-2]: int(token)
                for name, token in (content.get("lang_to_id") or {}).items()
            },
            tasks={
                str(name): int(token) for name, token in (content.get("task_to_id") or {}).items()
            },
            suppressed=[int(token) for token in content.get("suppress_tokens") or ()],
            suppressed_first=[int(token) for token in content.get("begin_suppress_tokens") or ()],
            latest_start=content.get("max_initial_timestamp_index"),
            alignment_heads=_heads(content, sizes),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{file}: {error} is missing or wrong; download the model again, or take the file of "
            "the model that this one was made from"
        ) from None
    _check_tokens(found, file)
    return found


def _sizes(file: Path) -> WhisperSizes:
    content = read_json(file)
    for name in _SIZES:
        value = content.get(name)
        if type(value) is not int or value < 1:
            raise ValueError(
                f"{file}: {name} is {value!r:.40}, not a size; download the model again"
            )
    sizes = WhisperSizes(
        **{name: content[name] for name in _SIZES},
        **{
            name: content[name]
            for name in ("activation_function", "median_filter_width")
            if name in content
        },
    )
    for heads in (sizes.encoder_attention_heads, sizes.decoder_attention_heads):
        if sizes.d_model % heads:
            raise ValueError(f"{file}: d_model {sizes.d_model} is no multiple of {heads} heads")
    if sizes.max_source_positions % (_FRAMES_PER_SECOND // 2):
        raise ValueError(
            f"{file}: max_source_positions {sizes.max_source_positions} is no number of whole "
            "seconds, which have 50 positions each"
        )
    if content.get("scale_embedding"):
        raise ValueError(f"{file}: scale_embedding is not supported; no published model sets it")
    return sizes


def _token(content: Mapping[str, Any], name: str) -> int:
    value = content[name]
    if type(value) is not int:
        raise ValueError(name)
    return value


def _heads(content: Mapping[str, Any], sizes: WhisperSizes) -> list[tuple[int, int]]:
    """Return the alignment heads. Without a list, these are all heads of the upper layers."""
    given = content.get("alignment_heads")
    if given is None:
        layers = range(sizes.decoder_layers // 2, sizes.decoder_layers)
        return [(layer, head) for layer in layers for head in range(sizes.decoder_attention_heads)]
    heads = [(int(layer), int(head)) for layer, head in given]
    for layer, head in heads:
        if not 0 <= layer < sizes.decoder_layers or not 0 <= head < sizes.decoder_attention_heads:
            raise ValueError("alignment_heads")
    return heads


def _check_tokens(folder: SpeechFolder, file: Path) -> None:
    """Raise `ValueError` if a token is not in the vocabulary."""
    last = folder.first_timestamp + folder.sizes.max_source_positions
    tokens = [
        *(folder.start, folder.end, folder.no_speech, last),
        *folder.languages.values(),
        *folder.tasks.values(),
        *folder.suppressed,
        *folder.suppressed_first,
    ]
    if not all(0 <= token < folder.sizes.vocab_size for token in tokens):
        raise ValueError(
            f"{file} names tokens that are not among the {folder.sizes.vocab_size:,} of config.json"
        )
    if folder.languages and not {"transcribe", "translate"} <= folder.tasks.keys():
        raise ValueError(f"{file}: task_to_id lacks transcribe or translate")
