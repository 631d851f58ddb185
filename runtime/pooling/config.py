"""The settings of a pooling engine. Imports nothing heavy, because flags are made from them."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.engine import DEVICES, DTYPES, MEMORY, MODEL
from ..config.options import check_options, check_threads, option

_POSITIVE = ("context_length", "chunked_prefill_size", "max_running_requests", "num_threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """The settings of a pooling model. None: chosen for this machine. Raises `ValueError` with a
    remedy.
    """

    model_path: str = option("", "folder of an embedder or a reranker", group=MODEL, metavar="PATH")
    tokenizer_path: str | None = option(
        None,
        "folder or tokenizer.json of the tokenizer; default: the model's",
        group=MODEL,
        metavar="PATH",
    )
    dtype: str = option(
        "auto",
        "number format of weights and activations; auto: as they are stored",
        group=MODEL,
        choices=DTYPES,
    )
    device: str = option("auto", "device that the model runs on", group=MODEL, choices=DEVICES)
    context_length: int | None = option(
        None, "longest text, in tokens; default: the model's", group=MODEL, metavar="N"
    )
    num_threads: int | None = option(
        None,
        "compute threads on a CPU; default: one per allowed core, within the CPU quota",
        group=MODEL,
        metavar="N",
    )
    chunked_prefill_size: int | None = option(
        None,
        "maximum number of tokens in one step, unless one text is longer; default: by device",
        group=MEMORY,
        metavar="N",
    )
    max_running_requests: int | None = option(
        None,
        "maximum number of concurrent requests, of up to 32 texts each; default: by device",
        group=MEMORY,
        metavar="N",
    )

    def __post_init__(self) -> None:
        check_options(self, _POSITIVE)
        check_threads(self.num_threads)
