"""Chooses which windows are heard and written together."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from ..core.speech_messages import (
    SAMPLE_RATE,
    SpeechOutput,
    SpeechRequest,
    SpeechSegment,
    SpeechStats,
    SpeechStep,
)
from .alignment import token_times
from .model import SpeechModel
from .rules import Draw, TokenRules
from .windows import LEAST_REST, Window, split

logger = logging.getLogger(__name__)
_FRAME = SAMPLE_RATE // 100  # Samples of a frame.


class _Job:
    """A request and its segments so far."""

    def __init__(self, request: SpeechRequest) -> None:
        self.request = request
        self.language = request.language
        self.segments: list[SpeechSegment] = []


class SpeechScheduler:
    """Writes the texts of up to `slots` windows side by side, a token of each in a step.

    While a slot is free, a step hears the next window instead. Running windows have the first
    slots, so that a step reads a contiguous part of the caches.
    """

    def __init__(self, model: SpeechModel) -> None:
        self._model, self._rules = model, TokenRules(model.folder)
        self._jobs: dict[str, _Job] = {}
        self._waiting: deque[tuple[str, Window | None]] = deque()
        self._running: list[Window] = []  # By slot.
        self._outputs: list[SpeechOutput] = []  # Results of the step that runs.
        self._alone = 0  # Windows that run one at a time, because a step with them has failed.
        self._steps = self._tokens = self._fallbacks = 0
        self._seconds = 0.0

    def add(self, request: SpeechRequest) -> None:
        self._jobs[request.rid] = _Job(request)
        self._waiting.append((request.rid, None))

    def abort(self, rids: list[str]) -> None:
        for rid in rids:
            if self._jobs.pop(rid, None) is not None:
                self._forget(rid)

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def stats(self) -> SpeechStats:
        running = {window.request.rid for window in self._running}
        return SpeechStats(
            running_requests=len(running),
            queued_requests=len(self._jobs) - len(running),
            steps_total=self._steps,
            audio_seconds_total=self._seconds,
            tokens_total=self._tokens,
            fallbacks_total=self._fallbacks,
        )

    def step(self) -> SpeechStep:
        """Hear a window, or write a token of each."""
        self._steps += 1
        self._outputs = []
        if self._waiting and len(self._running) < (1 if self._alone else self._model.slots):
            rid, window = self._waiting.popleft()
            self._guarded([rid], lambda: self._hear(rid, window))
        elif self._running:
            self._guarded([window.request.rid for window in self._running], self._write)
        return SpeechStep(outputs=self._outputs, stats=self.stats())

    def _guarded(self, rids: list[str], work: Callable[[], None]) -> None:
        """Do `work`. If it fails, the request that it is for ends with an error. Several requests
        run again, one at a time.
        """
        try:
            work()
        except Exception as error:
            if len(rids) > 1:
                logger.warning("a step failed, and its texts are written one at a time: %s", error)
                self._separate()
                return
            logger.exception("requests %s end", ", ".join(rids))
            for rid in rids:
                self._fail(rid, f"its computation failed: {error}")

    def _separate(self) -> None:
        """Begin the text of each running window again, one at a time."""
        self._alone = len(self._running)
        again = [(window.request.rid, window.fresh()) for window in self._running]
        self._running.clear()
        self._waiting.extendleft(reversed(again))

    def _hear(self, rid: str, window: Window | None) -> None:
        """Hear a window in the next slot, and choose the first token of its text."""
        job, model = self._jobs[rid], self._model
        if window is None:
            frames = len(job.request.audio) // 2 // _FRAME
            window = Window(job.request, model.spectrogram(job.request.audio), frames)
        states = model.encode(window.rest())
        if not torch.isfinite(states).all():
            self._fail(rid, "the model's result is not finite; serve it with --dtype float32")
            return
        slot = len(self._running)
        model.hear(slot, states)
        if job.language is None and model.folder.languages:
            job.language = self._detect(slot)
        window.prefix = self._prefix(job)
        self._running.append(window)
        self._begin(slot)

    def _detect(self, slot: int) -> str:
        """Return the code of the language that is spoken in a slot."""
        logits = self._model.read(slot, [self._model.folder.start])[0]
        languages = self._model.folder.languages
        return max(languages, key=lambda code: float(logits[languages[code]]))

    def _prefix(self, job: _Job) -> list[int]:
        folder, tokenizer = self._model.folder, self._model.tokenizer
        prefix = [folder.start]
        if folder.languages:
            assert job.language is not None
            prefix += [folder.languages[job.language], folder.tasks[job.request.task]]
        if prompt := job.request.prompt.strip():
            ids = tokenizer.encode(f" {prompt}", add_special_tokens=False)
            before = tokenizer.convert_tokens_to_ids("<|startofprev|>")
            room = folder.sizes.max_target_positions // 2 - 1
            prefix = [before, *ids[-room:], *prefix]
        return prefix

    def _begin(self, slot: int) -> None:
        """Read the prefix of a window and choose the first token of its attempt."""
        window, folder = self._running[slot], self._model.folder
        start = window.prefix.index(folder.start)
        logits = self._model.read(slot, window.prefix, (start, -1))
        window.no_speech = float(logits[0].softmax(-1)[folder.no_speech])
        self._choose(logits[1:], [window])

    def _write(self) -> None:
        """Write a token of each running window."""
        running = list(self._running)
        positions = [len(window.prefix) + len(window.attempt.tokens) - 1 for window in running]
        logits = self._model.step([window.attempt.tokens[-1] for window in running], positions)
        self._choose(logits, running)

    def _choose(self, logits: torch.Tensor, windows: list[Window]) -> None:
        """Append a token to each window's text, and finish those that have ended."""
        draws = [
            Draw(each.attempt.tokens, each.attempt.temperature, each.attempt.generator)
            for each in windows
        ]
        chosen = self._rules.choose(logits, draws)
        self._tokens += len(chosen)
        room = self._model.folder.sizes.max_target_positions
        for window, (token, logprob) in zip(windows, chosen, strict=True):
            window.attempt.add(token, logprob)
            if token == self._model.folder.end:
                window.attempt.tokens.pop()
                window.attempt.has_ended = True
            elif len(window.prefix) + len(window.attempt.tokens) < room:
                continue
            self._guarded([window.request.rid], partial(self._end, window))

    def _end(self, window: Window) -> None:
        """Accept a window's text, or begin it again with a higher temperature."""
        model, attempt = self._model, window.attempt
        text = model.tokenizer.decode(
            [token for token in attempt.tokens if token < model.folder.end]
        )
        slot = self._running.index(window)
        if window.looks_wrong(text) and window.next_attempt():
            self._fallbacks += 1
            self._begin(slot)
            return
        rid = window.request.rid
        job, done = self._jobs[rid], window.frames
        if attempt.tokens and not window.is_silent():
            frames = window.frames - window.start
            spans, covered = split(model.folder, attempt.tokens, frames)
            times = self._times(window, slot, frames) if window.request.words else []
            job.segments += window.segments(model, job.language or "en", times, spans)
            # A text that covers nothing would be written again for ever.
            done = window.start + covered if covered > 0 else window.frames
        self._free(slot)
        if window.frames - done >= LEAST_REST:
            rest = Window(window.request, window.spectrogram, window.frames, done)
            self._waiting.appendleft((rid, rest))
            return
        del self._jobs[rid]
        self._seconds += len(window.request.audio) / 2 / SAMPLE_RATE
        found = SpeechOutput(rid=rid, language=job.language or "en", segments=job.segments)
        self._outputs.append(found)

    def _times(self, window: Window, slot: int, frames: int) -> list[float]:
        """Return the time at which each token of a window's text begins, and that of the end."""
        prefix, tokens = window.prefix, window.attempt.tokens
        # The last token of a text has not been read, as in transformers.
        read = tokens if window.attempt.has_ended else tokens[:-1]
        weights = self._model.alignment(slot, [*prefix, *read])[:, len(prefix) :, : frames // 2]
        if 0 in weights.shape:
            return [0.0] * (len(tokens) + 1)
        times = token_times(weights, self._model.folder.sizes.median_filter_width)
        return times + times[-1:] * (len(tokens) + 1 - len(times))

    def _free(self, slot: int) -> None:
        """Give the slot of the last running window to no window, and that of `slot` to it."""
        self._alone = max(0, self._alone - 1)
        last = len(self._running) - 1
        if slot != last:
            self._model.move(last, slot)
            self._running[slot] = self._running[last]
        self._running.pop()

    def _forget(self, rid: str) -> None:
        self._waiting = deque(each for each in self._waiting if each[0] != rid)
        for slot in reversed(range(len(self._running))):
            if self._running[slot].request.rid == rid:
                self._free(slot)

    def _fail(self, rid: str, reason: str) -> None:
        if self._jobs.pop(rid, None) is not None:
            self._forget(rid)
            self._outputs.append(SpeechOutput(rid=rid, error=reason))
