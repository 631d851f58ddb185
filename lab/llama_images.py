"""Images by llama.cpp's own libraries, in one process: the peer where no llama-server is compiled.

    python -m piecework.lab.vision_gguf /tmp/smolvlm --longest 512
    python -m piecework.lab.llama_images llama-build/bin /tmp/smolvlm/model.gguf \\
        /tmp/smolvlm/mmproj.gguf --rounds 3

It prints the seconds to the first token of a prompt with a new picture of 512 x 512 pixels, and the
output tokens per second of eight requests, of which half have a picture or none: prompts one after
another, then all sequences in one batch. Nothing is sent over HTTP. The folder must have libmtmd.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from .llama_cpp import LlamaCpp

_POINTER = ctypes.c_void_p
_SIDE, _REQUESTS, _CONTEXT = 512, 8, 8192
# Bytes of `mtmd_context_params` before its number of threads.
_BEFORE_THREADS = 20


class _Params(ctypes.Structure):
    # Larger than any version of the struct.
    _fields_ = [
        ("before", ctypes.c_byte * _BEFORE_THREADS),
        ("threads", ctypes.c_int),
        ("others", ctypes.c_byte * 1000),
    ]


class _Text(ctypes.Structure):
    _fields_ = [
        ("text", ctypes.c_char_p),
        ("length", ctypes.c_size_t),
        ("add_special", ctypes.c_bool),
        ("parse_special", ctypes.c_bool),
    ]


class Images:
    """A model with its vision tower, and a context of several sequences."""

    def __init__(self, folder: str, model: str, mmproj: str, threads: int) -> None:
        self.llama = llama = LlamaCpp(folder)
        loaded, self.context = llama.load(model, _CONTEXT, 2048, _REQUESTS, threads)
        self.vocabulary = llama.vocabulary(loaded)
        self.mtmd = mtmd = ctypes.CDLL(str(next(Path(folder).glob("libmtmd.so*"))))
        # No lines on the terminal.
        self._log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _POINTER)(lambda *_: None)
        mtmd.mtmd_log_set(self._log, None)
        mtmd.mtmd_context_params_default.restype = _Params
        for name in (
            *("mtmd_init_from_file", "mtmd_bitmap_init", "mtmd_input_chunks_init"),
            "mtmd_input_chunks_get",
        ):
            getattr(mtmd, name).restype = _POINTER
        mtmd.mtmd_default_marker.restype = ctypes.c_char_p
        mtmd.mtmd_input_chunks_size.restype = ctypes.c_size_t
        params = mtmd.mtmd_context_params_default()
        params.threads = threads
        self.tower = _POINTER(mtmd.mtmd_init_from_file(mmproj.encode(), loaded, params))
        if not self.tower:
            raise ValueError(f"llama.cpp cannot load {mmproj}: name a vision tower that it knows")
        self.marker = mtmd.mtmd_default_marker().decode()

    def prompt(self, text: str, pictures: list[np.ndarray], sequence: int) -> tuple[int, int]:
        """Compute a prompt with the marker for each picture [height, width, 3]. Return the next
        token, and the length of the sequence.
        """
        mtmd = self.mtmd
        bitmaps = (_POINTER * max(1, len(pictures)))()
        for number, picture in enumerate(pictures):
            height, width, _ = picture.shape
            bitmaps[number] = mtmd.mtmd_bitmap_init(width, height, picture.tobytes())
        chunks = _POINTER(mtmd.mtmd_input_chunks_init())
        given = _Text(text.encode(), len(text), add_special=True, parse_special=True)
        count = ctypes.c_size_t(len(pictures))
        if mtmd.mtmd_tokenize(self.tower, chunks, ctypes.byref(given), bitmaps, count):
            raise ValueError("llama.cpp cannot read the prompt")
        length = ctypes.c_int32()
        if mtmd.mtmd_helper_eval_chunks(
            self.tower, self.context, chunks, 0, sequence, 2048, True, ctypes.byref(length)
        ):
            raise ValueError("llama.cpp cannot compute the prompt")
        mtmd.mtmd_input_chunks_free(chunks)
        for bitmap in bitmaps[: len(pictures)]:
            mtmd.mtmd_bitmap_free(_POINTER(bitmap))
        return self.llama.likeliest(self.context, self.vocabulary, -1), length.value


def _picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)


def _prompt(images: Images, words: int, *, has_picture: bool) -> str:
    mark = images.marker if has_picture else ""
    return f"<|im_start|>User: {mark}{' hello' * words}<end_of_utterance>\nAssistant:"


def _first_token(images: Images, given: Any, seed: int) -> float:
    images.llama.clear(images.context)
    began = time.perf_counter()
    images.prompt(_prompt(images, given.input_len, has_picture=True), [_picture(seed)], 0)
    return time.perf_counter() - began


def _rate(images: Images, given: Any, pictures: int, seed: int) -> float:
    """Return the output tokens per second of requests of which `pictures` have a picture."""
    images.llama.clear(images.context)
    began = time.perf_counter()
    tokens, lengths = [], []
    for number in range(_REQUESTS):
        has_picture = number < pictures
        text = _prompt(images, given.input_len, has_picture=has_picture)
        files = [_picture(100 * seed + number)] if has_picture else []
        token, length = images.prompt(text, files, number)
        tokens.append(token)
        lengths.append(length)
    for _ in range(given.output_len - 1):
        rows = list(zip(tokens, lengths, range(_REQUESTS), strict=True))
        tokens = images.llama.decode(images.context, images.vocabulary, rows, range(_REQUESTS))
        lengths = [length + 1 for length in lengths]
    return _REQUESTS * given.output_len / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.llama_images",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="of llama.cpp's libraries")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("mmproj", help="its vision tower")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    given = parser.parse_args()
    images = Images(given.folder, given.model, given.mmproj, given.threads)
    _first_token(images, given, 0)
    firsts = [_first_token(images, given, seed) for seed in range(1, given.rounds + 1)]
    print(
        f"first token, new image: {median(firsts):.2f} s ({min(firsts):.2f} to {max(firsts):.2f})"
    )
    for pictures in (0, _REQUESTS // 2):
        rates = [_rate(images, given, pictures, seed) for seed in range(1, given.rounds + 1)]
        print(
            f"output of {_REQUESTS} requests, {pictures} with an image: {median(rates):.1f} "
            f"tokens/s ({min(rates):.1f} to {max(rates):.1f})"
        )


if __name__ == "__main__":
    main()
