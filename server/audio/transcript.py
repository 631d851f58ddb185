"""Writes the text of a file: its pieces run side by side, and their segments come in order."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from typing import NamedTuple

from starlette.datastructures import UploadFile

from ...runtime.core.speech_messages import SpeechOutput, SpeechRequest, Task
from .decoding import Piece
from .formats import Placed
from .requests import AudioForm
from .state import SpeechServing


class Wanted(NamedTuple):
    """What to write. `language` is a code, or None if the model detects it."""

    task: Task
    language: str | None
    words: bool
    form: AudioForm


class Written(NamedTuple):
    """The segments of the next piece, and what is known of the whole audio so far."""

    segments: list[Placed]
    language: str
    seconds: float


async def write_file(
    serving: SpeechServing, file: UploadFile, wanted: Wanted
) -> AsyncGenerator[Written]:
    """Yield the text of a file piece by piece. Raises `ApiError` and the errors of the engine.

    The first piece decides the language of all others, if no language is given.
    """
    rid = f"audio-{uuid.uuid4().hex}"
    language = wanted.language
    needs_language = language is None and bool(serving.info.languages)
    running: deque[tuple[Piece, asyncio.Task[SpeechOutput]]] = deque()
    window = serving.info.window_seconds
    try:
        async with serving.decoders.open(file, window) as pieces:
            is_over, number = False, 0
            while True:
                most = 1 if needs_language else serving.ahead
                while not is_over and len(running) < most:
                    piece = await anext(pieces, None)
                    if piece is None:
                        is_over = True
                        break
                    request = SpeechRequest(
                        rid=f"{rid}-{number}",
                        audio=piece.samples,
                        task=wanted.task,
                        language=language,
                        prompt=wanted.form.prompt,
                        temperature=wanted.form.temperature,
                        words=wanted.words,
                        seed=(wanted.form.seed + number) % 2**63,
                    )
                    running.append((piece, asyncio.create_task(serving.engine.write(request))))
                    number += 1
                if not running:
                    return
                piece, task = running[0]
                output = await task
                running.popleft()
                if needs_language:
                    language, needs_language = output.language, False
                placed = [Placed(piece.start, segment) for segment in output.segments]
                yield Written(placed, output.language, piece.start + piece.seconds)
    finally:
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)
