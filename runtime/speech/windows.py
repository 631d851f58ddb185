"""One window of audio: its text as it is written, and the segments that it becomes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..core.speech_messages import SpeechRequest, SpeechSegment
from .alignment import SECONDS, join_words
from .folder import SpeechFolder
from .model import SpeechModel

# Source of the numbers: whisper/transcribe.py of openai-whisper 20250625.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_MOST_COMPRESSED = 2.4  # A text that zlib makes smaller than this repeats itself.
_LEAST_LOGPROB = -1.0
_SILENT = 0.6
_FRAMES = 2  # Frames of a spectrogram per position of the encoder.
LEAST_REST = 100  # Frames that are left after the last segment and are heard once more.


class Span(NamedTuple):
    """Tokens `begin` to `end` of a text, and the times of the segment that they make."""

    begin: int
    end: int
    start_seconds: float
    end_seconds: float


@dataclass(slots=True)
class Attempt:
    """A text that is being written at one temperature. `has_ended`: the model has ended it."""

    temperature: float
    generator: torch.Generator | None
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0
    chosen: int = 0
    has_ended: bool = False

    def add(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.logprob += logprob
        self.chosen += 1

    @property
    def avg_logprob(self) -> float:
        return self.logprob / max(1, self.chosen)


class Window:
    """A request's audio from frame `start`, and its attempts.

    Attributes:
        prefix: Tokens before the text: those of the prompt, the start, the language and the task.
        no_speech: Probability that the audio is silent.
    """

    def __init__(
        self, request: SpeechRequest, spectrogram: torch.Tensor, frames: int, start: int = 0
    ) -> None:
        self.request, self.spectrogram = request, spectrogram
        self.frames, self.start = frames, start
        self.prefix: list[int] = []
        self.no_speech = 0.0
        self._temperatures = list(
            TEMPERATURES if request.temperature == 0 else (request.temperature,)
        )
        self.attempt: Attempt
        self.next_attempt()

    def next_attempt(self) -> bool:
        """Begin a text at the next temperature. Return False if there is none."""
        if not self._temperatures:
            return False
        temperature = self._temperatures.pop(0)
        generator = None
        if temperature > 0:
            seed = hash((self.request.seed, self.start, round(1000 * temperature)))
            generator = torch.Generator().manual_seed(seed & (2**63 - 1))
        self.attempt = Attempt(temperature, generator)
        return True

    def fresh(self) -> Window:
        """Return the same window without attempts."""
        return Window(self.request, self.spectrogram, self.frames, self.start)

    def rest(self) -> torch.Tensor:
        """Return the spectrogram from `start`, with zeros where nothing is left."""
        heard = self.spectrogram[:, self.start : self.frames]
        found = torch.zeros_like(self.spectrogram)
        found[:, : heard.shape[1]] = heard
        return found if self.start else self.spectrogram

    def is_silent(self) -> bool:
        return self.no_speech > _SILENT and self.attempt.avg_logprob < _LEAST_LOGPROB

    def looks_wrong(self, text: str) -> bool:
        """Return whether to try again with a higher temperature."""
        if self.is_silent():
            return False
        return (
            compression_ratio(text) > _MOST_COMPRESSED or self.attempt.avg_logprob < _LEAST_LOGPROB
        )

    def segments(
        self, model: SpeechModel, language: str, times: Sequence[float], spans: Sequence[Span]
    ) -> list[SpeechSegment]:
        """Return the segments of the attempt. `times` holds the start of each token, if words are
        requested, and is empty otherwise.
        """
        offset = self.start / 100
        found = []
        for span in spans:
            own = range(span.begin, span.end)
            tokens = self.attempt.tokens[span.begin : span.end]
            places = [index for index in own if self.attempt.tokens[index] < model.folder.end]
            text = model.tokenizer.decode([self.attempt.tokens[index] for index in places])
            if not text.strip():
                continue
            words = []
            if times:
                runs = [offset + times[index] for index in places]
                after = places[-1] + 1
                runs.append(offset + times[min(after, len(times) - 1)])
                kept = [self.attempt.tokens[index] for index in places]
                words = join_words(model.tokenizer, kept, runs, language)
            found.append(
                SpeechSegment(
                    start=round(offset + span.start_seconds, 2),
                    end=round(offset + span.end_seconds, 2),
                    text=text,
                    tokens=tokens,
                    temperature=self.attempt.temperature,
                    avg_logprob=self.attempt.avg_logprob,
                    compression_ratio=compression_ratio(text),
                    no_speech_prob=self.no_speech,
                    words=words,
                )
            )
        return found


def compression_ratio(text: str) -> float:
    """Return how many times smaller zlib makes a text."""
    content = text.encode()
    return len(content) / len(zlib.compress(content))


def split(folder: SpeechFolder, tokens: Sequence[int], frames: int) -> tuple[list[Span], int]:
    """Split a text at its timestamps. Return the spans, and the frames that they cover.

    A segment ends at two timestamps in a row. What follows the last pair was cut off, so it is
    heard again, unless the text ends with a single timestamp.

    Source: _retrieve_segment of transformers 5.24, whose results a test compares.
    """
    begin = folder.first_timestamp

    def seconds(index: int) -> float:
        return (tokens[index] - begin) * SECONDS

    stamps = [token >= begin for token in tokens]
    ends = [index + 1 for index in range(len(stamps) - 1) if stamps[index] and stamps[index + 1]]
    ends_with_one = stamps[-2:] == [False, True]
    if not ends:
        length = frames // _FRAMES * SECONDS
        last = next((index for index in reversed(range(len(tokens))) if stamps[index]), None)
        if last is not None and tokens[last] != begin:
            length = seconds(last)
        return [Span(0, len(tokens), 0.0, length)], frames
    if ends_with_one:
        ends.append(len(tokens))
    else:
        ends[-1] += 1
    spans, start = [], 0
    for end in ends:
        is_double = end == ends[-1] and not ends_with_one
        last = end - (2 if is_double else 1)
        spans.append(Span(start, end, seconds(start), seconds(last)))
        start = end
    if ends_with_one:
        return spans, frames
    return spans, (tokens[start - 2] - begin) * _FRAMES
