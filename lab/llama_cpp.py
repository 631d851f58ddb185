"""llama.cpp's shared library, to compare with on the same files:

    npm pack @node-llama-cpp/linux-x64@3.21.1 && tar xzf node-llama-cpp-linux-x64-3.21.1.tgz
    python -m piecework.lab.llama_cpp package/bins/linux-x64 source.gguf target.gguf Q4_K_M

The command writes a file in another format, as `llama-quantize` does; `--pure` gives every tensor
the same one. A build of llama.cpp itself has the same library as `build/bin`.
"""

from __future__ import annotations

import argparse
import ctypes
import math
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

_POINTER = ctypes.c_void_p
_MODEL_PARAMS = 1024
"""Bytes given to a struct whose fields this file does not read, and which has fewer of them."""


class _ModelParams(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint64 * (_MODEL_PARAMS // 8))]


class _ContextParams(ctypes.Structure):
    # Only the first fields, which stand there in every version.
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        ("others", ctypes.c_uint64 * (_MODEL_PARAMS // 8)),
    ]


class _QuantizeParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("threads", "ftype", "output_type", "embedding_type")),
        *((name, ctypes.c_bool) for name in ("requantize", "quantize_output", "only_copy", "pure")),
        ("others", ctypes.c_uint64 * (_MODEL_PARAMS // 8)),
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        ("tokens", ctypes.c_int32),
        *((name, _POINTER) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    ]


class LlamaCpp:
    """The library of a folder that holds `libllama*.so` and `libggml*.so`."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        ggml = ctypes.CDLL(str(_found(folder, "libggml.*so*")), ctypes.RTLD_GLOBAL)
        ggml.ggml_backend_load_all_from_path(str(folder).encode())
        self.library = library = ctypes.CDLL(str(_found(folder, "libllama.*so*")))
        for name, result in (
            ("llama_model_default_params", _ModelParams),
            ("llama_context_default_params", _ContextParams),
            ("llama_model_quantize_default_params", _QuantizeParams),
            ("llama_model_load_from_file", _POINTER),
            ("llama_init_from_model", _POINTER),
            ("llama_get_memory", _POINTER),
            ("llama_get_logits", ctypes.POINTER(ctypes.c_float)),
            ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float)),
            ("llama_adapter_lora_init", _POINTER),
            ("llama_model_get_vocab", _POINTER),
        ):
            getattr(library, name).restype = result
        self._log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _POINTER)(lambda *_: None)
        library.llama_log_set(self._log, None)
        library.llama_backend_init()

    def quantize(self, source: str, target: str, kind: str, *, pure: bool = False) -> None:
        """`kind`: as `llama-quantize` has it, such as Q4_K_M."""
        params = self.library.llama_model_quantize_default_params()
        params.ftype = gguf.LlamaFileType[f"MOSTLY_{kind}"]
        params.requantize, params.pure = True, pure
        if self.library.llama_model_quantize(
            source.encode(), target.encode(), ctypes.byref(params)
        ):
            raise ValueError(f"llama.cpp cannot write {source} as {kind}: try llama-quantize")

    def load(
        self, path: str, tokens: int, batch: int, sequences: int = 1, threads: int = 1
    ) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """Return a model, and a context of `tokens` that takes `batch` tokens at once."""
        library = self.library
        model = _POINTER(
            library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
        )
        if not model:
            raise ValueError(f"llama.cpp cannot load {path}: name a .gguf file that it knows")
        params = library.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = tokens, batch, sequences
        context = _POINTER(library.llama_init_from_model(model, params))
        if not context:
            raise ValueError(f"llama.cpp has no memory for {tokens} tokens")
        library.llama_set_n_threads(context, threads, threads)
        return model, context

    def decode(
        self,
        context: ctypes.c_void_p,
        vocabulary: int,
        rows: Sequence[tuple[int, int, int]],
        wanted: Sequence[int],
    ) -> list[int]:
        """Compute rows of a token, its position and its sequence. Return the likeliest next tokens
        of the `wanted` rows.
        """
        count = len(rows)
        token, position, sequence = (
            (ctypes.c_int32 * count)(*numbers) for numbers in zip(*rows, strict=True)
        )
        begin, size = ctypes.addressof(sequence), ctypes.sizeof(ctypes.c_int32)
        sequences = (_POINTER * count)(*(begin + size * row for row in range(count)))
        number, flags = (ctypes.c_int32 * count)(*[1] * count), (ctypes.c_int8 * count)()
        for row in wanted:
            flags[row] = 1
        batch = Batch(
            tokens=count,
            token=ctypes.addressof(token),
            pos=ctypes.addressof(position),
            n_seq_id=ctypes.addressof(number),
            seq_id=ctypes.addressof(sequences),
            logits=ctypes.addressof(flags),
        )
        if self.library.llama_decode(context, batch):
            raise ValueError(f"llama.cpp cannot decode {count} tokens")
        return [self.likeliest(context, vocabulary, row) for row in wanted]

    def likeliest(self, context: ctypes.c_void_p, vocabulary: int, row: int) -> int:
        """Return the likeliest next token of a row of the last batch. -1: of the last row."""
        logits = self.library.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())

    def vocabulary(self, model: ctypes.c_void_p) -> int:
        """Return the number of tokens that a model knows."""
        library = self.library
        found = library.llama_vocab_n_tokens(_POINTER(library.llama_model_get_vocab(model)))
        return int(found)

    def clear(self, context: ctypes.c_void_p) -> None:
        """Forget all sequences."""
        library = self.library
        library.llama_memory_clear(_POINTER(library.llama_get_memory(context)), True)

    def logprobs(self, path: str, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token but the first of each text, in nats."""
        library, most = self.library, max(map(len, texts))
        model, context = self.load(path, most, most)
        vocabulary = self.vocabulary(model)
        found = [self._text_logprobs(context, text, vocabulary) for text in texts]
        library.llama_free(context)
        library.llama_model_free(model)
        return found

    def _text_logprobs(
        self, context: ctypes.c_void_p, text: Sequence[int], vocabulary: int
    ) -> list[float]:
        library = self.library
        library.llama_memory_clear(_POINTER(library.llama_get_memory(context)), True)
        tokens = (ctypes.c_int32 * len(text))(*text)
        every = (ctypes.c_int8 * len(text))(*[1] * len(text))
        batch = Batch(tokens=len(text), token=ctypes.addressof(tokens))
        batch.logits = ctypes.addressof(every)
        if library.llama_decode(context, batch):
            raise ValueError(f"llama.cpp cannot decode {len(text)} tokens")
        logits = np.ctypeslib.as_array(library.llama_get_logits(context), (len(text), vocabulary))
        return [
            float(row[token]) - _log_sum(row) for row, token in zip(logits, text[1:], strict=False)
        ]


def _found(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise ValueError(f"{folder} holds no {pattern}: name the folder of llama.cpp's libraries")
    return found[0]


def _log_sum(row: np.ndarray) -> float:
    top = float(row.max())
    return top + math.log(float(np.exp(row.astype(np.float64) - top).sum()))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.llama_cpp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="of llama.cpp's libraries")
    parser.add_argument("source", help="a .gguf file")
    parser.add_argument("target", help="what is written")
    parser.add_argument("kind", help="such as Q4_K_M")
    parser.add_argument("--pure", action="store_true", help="one format for every tensor")
    arguments = parser.parse_args()
    LlamaCpp(arguments.folder).quantize(
        arguments.source, arguments.target, arguments.kind, pure=arguments.pure
    )


if __name__ == "__main__":
    main()
