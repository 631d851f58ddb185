"""Seconds of audio a second, beside faster-whisper and whisper.cpp on the same weights, in turn.

    python -m piecework.lab.speech_speed speech.wav --model whisper-tiny.en \
        --ctranslate2 FOLDER --ggml ggml-tiny.en.bin

`--ctranslate2` needs faster-whisper, `--ggml` pywhispercpp. All choose the likeliest token.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..runtime.core.speech_messages import SpeechRequest
from ..runtime.speech.config import SpeechConfig
from ..runtime.speech.model import SpeechModel
from ..runtime.speech.scheduler import SpeechScheduler
from ..server.audio.decoding import pause

_RATE = 16_000
_PIECE = 30 * _RATE


def _ours(model: SpeechModel, samples: Any) -> None:
    """Write the text of all pieces side by side, as the server does."""
    scheduler, begin, number = SpeechScheduler(model), 0, 0
    while begin < len(samples):
        rest = samples[begin:]
        length = len(rest) if len(rest) <= _PIECE else pause(rest[:_PIECE])
        audio = rest[:length].tobytes()
        scheduler.add(SpeechRequest(rid=str(number), audio=audio))
        begin, number = begin + length, number + 1
    while scheduler.has_work:
        scheduler.step()


def _faster_whisper(model: Any, numbers: Any) -> None:
    settings = {"beam_size": 1, "condition_on_previous_text": False, "language": "en"}
    list(model.transcribe(numbers, **settings)[0])


def _samples(path: str) -> Any:
    """Return the samples [T] int16 of a file, mono, 16,000 a second."""
    import av

    resampler = av.AudioResampler(format="s16", layout="mono", rate=_RATE)
    with av.open(path) as file:
        frames = [each for frame in file.decode(audio=0) for each in resampler.resample(frame)]
    frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray() for frame in frames], 1)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("audio")
    parser.add_argument("--model", required=True)
    parser.add_argument("--ctranslate2")
    parser.add_argument("--ggml")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    samples, threads = _samples(given.audio), given.num_threads
    numbers = samples.astype(np.float32) / 32768
    runs: dict[str, Callable[[], Any]] = {}
    for dtype in ("bfloat16", "float32"):
        config = SpeechConfig(model_path=given.model, dtype=dtype, num_threads=threads)
        model = SpeechModel(config)
        runs[f"piecework {dtype}"] = partial(_ours, model, samples)
    if given.ctranslate2:
        from faster_whisper import WhisperModel  # type: ignore[import-not-found]

        for kind in ("float32", "int8"):
            peer = WhisperModel(given.ctranslate2, compute_type=kind, cpu_threads=threads)
            runs[f"faster-whisper {kind}"] = partial(_faster_whisper, peer, numbers)
    if given.ggml:
        from pywhispercpp.model import Model  # type: ignore[import-not-found]

        whisper = Model(given.ggml, n_threads=threads, print_progress=False)
        runs["whisper.cpp"] = lambda: whisper.transcribe(numbers, no_context=True, language="en")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(given.rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    for name, seconds in times.items():
        speed = len(samples) / _RATE / min(seconds)
        print(f"{name:24} {min(seconds):.2f} s, {speed:.1f} s of audio a second")


if __name__ == "__main__":
    main()
