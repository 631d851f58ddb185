"""The settings of a speech engine. Imports nothing heavy, because flags are made from them."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.engine import DEVICES, DTYPES, MEMORY, MODEL
from ..config.options import check_options, check_threads, option


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechConfig:
    """The settings of a speech model. None: chosen for this machine. Raises `ValueError` with a
    remedy.
    """

    model_path: str = option("", "folder of a Whisper model", group=MODEL, metavar="PATH")
    dtype: str = option(
        "auto",
        "number format of weights and activations; auto: the device's own format of 16 bits",
        group=MODEL,
        choices=DTYPES,
    )
    device: str = option("auto", "device that the model runs on", group=MODEL, choices=DEVICES)
    num_threads: int | None = option(
        None,
        "compute threads on a CPU; default: one per allowed core, within the CPU quota",
        group=MODEL,
        metavar="N",
    )
    max_running_requests: int = option(
        8,
        "maximum number of pieces of audio, of up to 30 seconds each, that are written at once",
        group=MEMORY,
        metavar="N",
    )

    def __post_init__(self) -> None:
        check_options(self, ("max_running_requests", "num_threads"))
        check_threads(self.num_threads)
