"""Texts per second through an embedder, compared with sentence-transformers in the same process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import numpy as np

from ..runtime.pooling.config import PoolingConfig
from ..runtime.pooling.model import PoolingModel, PoolInput
from ..runtime.tokenizer.tokenizer import load_tokenizer
from ..server.core.limits import Limits
from ..server.pooling.inputs import InputEncoder
from .report import Report

_WORDS = (
    *("the", "of", "a", "to", "in", "is", "it", "for", "on", "with", "as", "at", "by", "from"),
    *("this", "that", "one", "two", "cat", "dog", "river", "stone", "light", "house", "music"),
    *("winter", "paper", "engine", "garden", "silver", "morning", "story", "window", "letter"),
)
_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsSettings:
    model_path: str = ""
    dtype: str = "auto"
    batch_size: int = 32  # Number of texts.
    words: int = 24  # Maximum words of a text.
    rounds: int = 20  # Rounds of each side; the fastest counts.
    num_threads: int | None = None
    peer: bool = True


def run(settings: EmbeddingsSettings, report: Report) -> int:
    """Measure and report. Return the exit code. Raises `ValueError` for an error that the user can
    correct.
    """
    if not settings.model_path:
        raise ValueError("name an embedder's folder: --model-path PATH")
    config = PoolingConfig(
        model_path=settings.model_path, dtype=settings.dtype, num_threads=settings.num_threads
    )
    model = PoolingModel(config)
    if model.folder.is_classifier:
        raise ValueError(f"{settings.model_path} is a reranker; name an embedder's folder")
    texts = make_texts(settings.batch_size, settings.words)
    ours = _ours(model)
    sides: dict[str, Callable[[Sequence[str]], Any]] = {"piecework": ours}
    if settings.peer:
        sides["sentence-transformers"] = _peer(settings, str(model.folder.path))
    vectors = {name: embed(texts) for name, embed in sides.items()}
    seconds = least_times(sides, texts, settings.rounds)
    rates = {name: settings.batch_size / taken for name, taken in seconds.items()}
    result: dict[str, Any] = {"settings": asdict(settings), "texts_per_second": rates}
    lines = ["| | texts/s | ms a batch |", "|---|---|---|"]
    lines += [
        f"| {name} | {rate:,.0f} | {seconds[name] * 1000:.1f} |" for name, rate in rates.items()
    ]
    if settings.peer:
        ratio = rates["piecework"] / rates["sentence-transformers"]
        difference = float(np.abs(vectors["piecework"] - vectors["sentence-transformers"]).max())
        result |= {"ratio": ratio, "largest_difference": difference}
        lines += ["", f"ratio {ratio:.2f}, largest difference of a number {difference:.1e}"]
    report.print(lines)
    report.write(result)
    return 0


def make_texts(count: int, most: int) -> list[str]:
    """Return `count` texts of 4 to `most` words. They are the same in every run."""
    draw = random.Random(0)
    return [
        " ".join(draw.choices(_WORDS, k=draw.randint(min(4, most), most))) for _ in range(count)
    ]


def least_times(
    sides: dict[str, Callable[[Sequence[str]], Any]], texts: Sequence[str], rounds: int
) -> dict[str, float]:
    """Return the seconds of each side's fastest round.

    The sides alternate, so that load of other programs affects both.
    """
    least = dict.fromkeys(sides, float("inf"))
    for number in range(_WARM_UP + rounds):
        for name, embed in sides.items():
            began = time.perf_counter()
            embed(texts)
            if number >= _WARM_UP:
                least[name] = min(least[name], time.perf_counter() - began)
    return least


def _ours(model: PoolingModel) -> Callable[[Sequence[str]], Any]:
    limits = Limits(model.context_length, model.vocab_size)
    folder = model.folder
    encoder = InputEncoder(
        load_tokenizer(str(folder.path)),
        limits,
        lower_case=folder.lower_case,
        tells_pairs=folder.tells_pairs,
    )

    def embed(texts: Sequence[str]) -> Any:
        inputs = encoder.texts(texts, [""] * len(texts), cut=-1)
        return model.run([PoolInput(*each) for each in inputs])

    return embed


def _peer(settings: EmbeddingsSettings, path: str) -> Callable[[Sequence[str]], Any]:
    try:
        peer_class = import_module("sentence_transformers").SentenceTransformer
    except ImportError:
        raise ValueError(
            "sentence-transformers is not installed: pip install it, or add --no-peer"
        ) from None
    model_kwargs = {} if settings.dtype == "auto" else {"dtype": settings.dtype}
    peer = peer_class(path, model_kwargs=model_kwargs)
    return lambda texts: peer.encode(list(texts), batch_size=settings.batch_size)
