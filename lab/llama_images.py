"""A picture in the vision tower of a GGUF file here, and in llama.cpp's own library:

    python -m piecework.lab.vision_gguf /tmp/smolvlm --longest 512
    python -m piecework.lab.llama_images llama-build/bin /tmp/smolvlm/model.gguf \\
        /tmp/smolvlm/mmproj.gguf --rounds 3

Both encode the same tile of 512 x 512 random pixels on one thread, in one process, and take turns.
It prints the processor seconds of each round, and the lowest cosine of two rows that should be
equal. The folder must have libmtmd.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..kernels.cpu.platform import CpuPlatform
from ..runtime.multimodal.pieces import Pieces
from ..runtime.multimodal.source import find_source
from ..runtime.multimodal.tower import load_tower
from .llama_cpp import LlamaCpp

_POINTER = ctypes.c_void_p
_SIDE = 512
_BEFORE_THREADS = 20  # Bytes of `mtmd_context_params` before its number of threads.
_IMAGE = 1  # `MTMD_INPUT_CHUNK_TYPE_IMAGE`


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


class Peer:
    """llama.cpp's tower and the first tile of a picture [height, width, 3]."""

    def __init__(self, folder: str, model: str, mmproj: str, picture: np.ndarray) -> None:
        llama = LlamaCpp(folder)
        loaded, _ = llama.load(model, 1024, 512)
        self._mtmd = mtmd = ctypes.CDLL(str(next(Path(folder).glob("libmtmd.so*"))))
        # No lines on the terminal.
        self._log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _POINTER)(lambda *_: None)
        mtmd.mtmd_log_set(self._log, None)
        for name, result in (
            ("mtmd_context_params_default", _Params),
            ("mtmd_init_from_file", _POINTER),
            ("mtmd_bitmap_init", _POINTER),
            ("mtmd_input_chunks_init", _POINTER),
            ("mtmd_input_chunks_get", _POINTER),
            ("mtmd_input_chunks_size", ctypes.c_size_t),
            ("mtmd_input_chunk_get_n_tokens", ctypes.c_size_t),
            ("mtmd_default_marker", ctypes.c_char_p),
            ("mtmd_get_output_embd", ctypes.POINTER(ctypes.c_float)),
        ):
            getattr(mtmd, name).restype = result
        params = mtmd.mtmd_context_params_default()
        params.threads = 1
        self._tower = _POINTER(mtmd.mtmd_init_from_file(mmproj.encode(), loaded, params))
        if not self._tower:
            raise ValueError(f"llama.cpp cannot load {mmproj}: name a vision tower that it knows")
        height, width, _ = picture.shape
        bitmaps = (_POINTER * 1)(mtmd.mtmd_bitmap_init(width, height, picture.tobytes()))
        mark, chunks = mtmd.mtmd_default_marker(), _POINTER(mtmd.mtmd_input_chunks_init())
        text = _Text(mark, len(mark), add_special=True, parse_special=True)
        if mtmd.mtmd_tokenize(self._tower, chunks, ctypes.byref(text), bitmaps, ctypes.c_size_t(1)):
            raise ValueError("llama.cpp cannot read the picture")
        parts = [
            _POINTER(mtmd.mtmd_input_chunks_get(chunks, ctypes.c_size_t(number)))
            for number in range(mtmd.mtmd_input_chunks_size(chunks))
        ]
        images = [each for each in parts if mtmd.mtmd_input_chunk_get_type(each) == _IMAGE]
        self.tiles, self._tile = len(images), images[0]
        self._rows = mtmd.mtmd_input_chunk_get_n_tokens(self._tile)

    def encode(self, width: int) -> np.ndarray:
        """Return the embeddings [rows, width] of the tile."""
        if self._mtmd.mtmd_encode_chunk(self._tower, self._tile):
            raise ValueError("llama.cpp cannot encode the picture")
        found = self._mtmd.mtmd_get_output_embd(self._tower)
        return np.ctypeslib.as_array(found, (self._rows, width)).copy()


def _own(model: str, mmproj: str, picture: np.ndarray) -> Any:
    """Return a function that encodes the picture in pieces of 64 rows."""
    from PIL import Image

    platform, dtype = CpuPlatform(), torch.bfloat16
    platform.set_up(1)
    kernels = platform.linear_kernels(dtype, platform.make_attention_backend("native"))
    source = find_source(model, mmproj)
    assert source is not None
    family = source.family
    tower = load_tower(source, dtype, platform.device(), kernels, platform.lacking_dtypes)
    arrays = family.process(source.image_processor(), Image.fromarray(picture), "auto")
    tensors = {name: torch.from_numpy(arrays[name]) for name in family.tensors if name in arrays}

    def encode() -> np.ndarray:
        parts = list(family.parts(tensors))
        pieces = Pieces(
            lambda: [family.features(tower.model, part, dtype)[0] for part in parts],
            platform.encoder_rows,
        )
        while not pieces.is_done:
            pieces.advance()
        assert pieces.result is not None
        return np.asarray(torch.cat([each.flatten(0, -2) for each in pieces.result]).float())

    return encode


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.llama_images",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="of llama.cpp's libraries")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("mmproj", help="its vision tower")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    picture = np.random.default_rng(0).integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)
    peer = Peer(given.folder, given.model, given.mmproj, picture)
    encode = _own(given.model, given.mmproj, picture)
    width = encode().shape[1]
    own, others = list[float](), list[float]()
    for _ in range(given.rounds):
        began = time.process_time()
        theirs = peer.encode(width)
        between = time.process_time()
        ours = encode()
        others.append(between - began)
        own.append(time.process_time() - between)
    lengths = np.linalg.norm(theirs, axis=1) * np.linalg.norm(ours, axis=1)
    print(f"piecework: {', '.join(f'{each:.2f} s' for each in own)}")
    print(f"llama.cpp: {', '.join(f'{each:.2f} s' for each in others)}, {peer.tiles} tiles in all")
    print(f"lowest cosine of two rows: {((theirs * ours).sum(1) / lengths).min():.5f}")


if __name__ == "__main__":
    main()
