"""Word error rate on speech of espeak-ng, beside transformers on the same weights and audio.

    pip install espeakng-loader
    python -m piecework.lab.speech_errors --model whisper-tiny.en

The speech is of 40 sentences that are used to measure telephone lines (Harvard sentences).
"""

from __future__ import annotations

import argparse
import ctypes
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..runtime.core.speech_messages import SpeechRequest
from ..runtime.speech.config import SpeechConfig
from ..runtime.speech.model import SpeechModel
from ..runtime.speech.scheduler import SpeechScheduler

_RATE = 16_000
_SENTENCES = """\
The birch canoe slid on the smooth planks. Glue the sheet to the dark blue background.
It's easy to tell the depth of a well. These days a chicken leg is a rare dish.
Rice is often served in round bowls. The juice of lemons makes fine punch.
The box was thrown beside the parked truck. The hogs were fed chopped corn and garbage.
Four hours of steady work faced us. A large size in stockings is hard to sell.
The boy was there when the sun rose. A rod is used to catch pink salmon.
The source of the huge river is the clear spring. Kick the ball straight and follow through.
Help the woman get back to her feet. A pot of tea helps to pass the evening.
Smoky fires lack flame and heat. The soft cushion broke the man's fall.
The salt breeze came across from the sea. The girl at the booth sold fifty bonds.
The small pup gnawed a hole in the sock. The fish twisted and turned on the bent hook.
Press the pants and sew a button on the vest. The swan dive was far short of perfect.
The beauty of the view stunned the young boy. Two blue fish swam in the tank.
Her purse was full of useless trash. The colt reared and threw the tall rider.
It snowed, rained, and hailed the same morning. Read verse out loud for pleasure.
Hoist the load to your left shoulder. Take the winding path to reach the lake.
Note closely the size of the gas tank. Wipe the grease off his dirty face.
Mend the coat before you go out. The wrist was badly strained and hung limp.
The stray cat gave birth to kittens. The young girl gave no clear response.
The meal was cooked before the bell rang. What joy there is in living.
"""
_SYNCHRONOUS, _UTF_8 = 2, 1
_PIECES = 8
_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


def speak(texts: Sequence[str]) -> list[Any]:
    """Return the samples [T] int16 of each text."""
    import espeakng_loader  # type: ignore[import-not-found]

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    data = espeakng_loader.get_data_path().encode()
    own_rate = library.espeak_Initialize(_SYNCHRONOUS, 0, data, 0)
    library.espeak_SetVoiceByName(b"en-us")
    heard: list[Any] = []

    def keep(samples: Any, count: int, _: Any) -> int:
        if samples and count:
            heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    callback = _Callback(keep)  # Kept alive as long as the library calls it.
    library.espeak_SetSynthCallback(callback)
    spoken = []
    for text in texts:
        heard.clear()
        content = text.encode()
        library.espeak_Synth(content, len(content) + 1, 0, 1, 0, _UTF_8, None, None)
        samples = np.concatenate(heard)
        places = np.arange(0, len(samples), own_rate / _RATE)
        spoken.append(np.interp(places, np.arange(len(samples)), samples).astype(np.int16))
    return spoken


def ours(path: str, dtype: str, pieces: Sequence[Any]) -> list[str]:
    """Return the texts that the server's engine writes."""
    scheduler = SpeechScheduler(SpeechModel(SpeechConfig(model_path=path, dtype=dtype)))
    for number, samples in enumerate(pieces):
        scheduler.add(SpeechRequest(rid=str(number), audio=samples.tobytes()))
    texts: dict[str, str] = {}
    while scheduler.has_work:
        for output in scheduler.step().outputs:
            texts[output.rid] = " ".join(segment.text for segment in output.segments)
    return [texts[str(number)] for number in range(len(pieces))]


def transformers_texts(path: str, pieces: Sequence[Any]) -> list[str]:
    """Return the texts of transformers' `generate`, in float32."""
    from transformers import (
        PreTrainedTokenizerFast,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    model = WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    extractor = WhisperFeatureExtractor.from_pretrained(path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{path}/tokenizer.json")
    texts = []
    for samples in pieces:
        numbers = samples.astype(np.float32) / 32768
        heard = extractor(numbers, sampling_rate=_RATE, return_tensors="pt").input_features
        ids = model.generate(heard, return_timestamps=True, do_sample=False)
        texts.append(tokenizer.decode(ids[0], skip_special_tokens=True))
    return texts


def words(text: str) -> list[str]:
    """Return the words in lower case, without timestamps and punctuation."""
    return re.findall(r"[a-z0-9']+", re.sub(r"<\|.*?\|>", " ", text.lower()))


def errors(said: Sequence[str], written: Sequence[str]) -> int:
    """Return how many words must be changed, left out or added."""
    row = list(range(len(written) + 1))
    for number, word in enumerate(said, 1):
        before, row[0] = row[0], number
        for place, other in enumerate(written, 1):
            above = row[place]
            row[place] = min(before + (word != other), above + 1, row[place - 1] + 1)
            before = above
    return row[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a Whisper model")
    path = parser.parse_args().model
    lines = _SENTENCES.splitlines()
    size = -(-len(lines) // _PIECES)
    said = [" ".join(lines[begin : begin + size]) for begin in range(0, len(lines), size)]
    pieces = speak(said)
    total = sum(len(words(text)) for text in said)
    print(f"{sum(map(len, pieces)) / _RATE:.0f} s of speech, {total} words")
    for name, texts in (
        ("transformers float32", transformers_texts(path, pieces)),
        ("piecework float32", ours(path, "float32", pieces)),
        ("piecework bfloat16", ours(path, "bfloat16", pieces)),
    ):
        wrong = sum(
            errors(words(one), words(other)) for one, other in zip(said, texts, strict=True)
        )
        print(f"{name:22} {wrong} errors, {100 * wrong / total:.1f} % of the words")


if __name__ == "__main__":
    main()
