"""The forms of an answer: JSON, text and subtitles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import UNSET, UnsetType

from ...runtime.core.speech_messages import SpeechSegment
from ..core.answers import Answer


class DurationUsage(Answer, kw_only=True):
    """Whole seconds of audio, rounded up, as OpenAI counts them."""

    type: Literal["duration"] = "duration"
    seconds: int


class Transcription(Answer, kw_only=True):
    text: str
    usage: DurationUsage


class TranscriptionWord(Answer):
    word: str
    start: float
    end: float


class TranscriptionSegment(Answer, kw_only=True):
    """Times are in seconds. `seek` is the start of the piece, in hundredths of one."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class VerboseTranscription(Answer, kw_only=True):
    """`segments` and `words` are set if `timestamp_granularities` names them."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment] | UnsetType = UNSET
    words: list[TranscriptionWord] | UnsetType = UNSET
    usage: DurationUsage


class TextDelta(Answer, kw_only=True):
    """An event of a stream: the text of a segment."""

    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str


class TextDone(Answer, kw_only=True):
    """The last event of a stream: the whole text."""

    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    usage: DurationUsage


class Placed(Answer):
    """A segment of a piece of audio that begins at `start` seconds."""

    start: float
    segment: SpeechSegment


def usage_of(seconds: float) -> DurationUsage:
    return DurationUsage(seconds=math.ceil(seconds))


def text_of(segments: Iterable[Placed]) -> str:
    return "".join(each.segment.text for each in segments).strip()


def segments_of(placed: Sequence[Placed]) -> list[TranscriptionSegment]:
    return [
        TranscriptionSegment(
            id=number,
            seek=round(100 * start),
            start=round(start + segment.start, 2),
            end=round(start + segment.end, 2),
            text=segment.text,
            tokens=segment.tokens,
            temperature=segment.temperature,
            avg_logprob=segment.avg_logprob,
            compression_ratio=segment.compression_ratio,
            no_speech_prob=segment.no_speech_prob,
        )
        for number, (start, segment) in enumerate((each.start, each.segment) for each in placed)
    ]


def words_of(placed: Iterable[Placed]) -> list[TranscriptionWord]:
    return [
        TranscriptionWord(
            word.text.strip(), round(each.start + word.start, 2), round(each.start + word.end, 2)
        )
        for each in placed
        for word in each.segment.words
    ]


def srt(placed: Iterable[Placed]) -> str:
    """Return subtitles in SubRip's format."""
    return "".join(
        f"{number}\n{_span(each, ',')}\n{_line(each)}\n\n"
        for number, each in enumerate(placed, start=1)
    )


def vtt(placed: Iterable[Placed]) -> str:
    """Return subtitles in the format of WebVTT."""
    return "WEBVTT\n\n" + "".join(f"{_span(each, '.')}\n{_line(each)}\n\n" for each in placed)


def _line(placed: Placed) -> str:
    # An arrow would be read as times, and an empty line as the end.
    return " ".join(placed.segment.text.split()).replace("-->", "->")


def _span(placed: Placed, point: str) -> str:
    begin, end = (placed.start + each for each in (placed.segment.start, placed.segment.end))
    return f"{_time(begin, point)} --> {_time(end, point)}"


def _time(seconds: float, point: str) -> str:
    whole, thousandths = divmod(round(1000 * seconds), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{point}{thousandths:03}"
