"""What the engine is told: one frozen dataclass, validated once; "auto" (None) is resolved by `model_runner` into numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu")


def option(default: Any, help: str, *, choices: tuple[str, ...] | None = None, metavar: str | None = None) -> Any:
    """A dataclass field that is also a command-line flag of the same name (`max_total_tokens` -> `--max-total-tokens`)."""
    return field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. None means "choose for this machine". Raises `ValueError` with a remedy."""

    model_path: str = option(
        "smollm2-135m",
        "the model: a Hugging Face folder, a .gguf file, a built-in alias (smollm2-135m), or a hub id",
        metavar="PATH",
    )
    tokenizer_path: str | None = option(None, "folder or tokenizer.json of the tokenizer, where it is not the model's own", metavar="PATH")
    dtype: str = option("auto", "number format of weights, activations and KV cache; auto: the model's, on CPU bfloat16", choices=DTYPES)
    device: str = option("auto", "where the model runs", choices=DEVICES)
    context_length: int | None = option(None, "longest prompt plus output, in tokens; default: the model's own", metavar="N")
    mem_fraction_static: float | None = option(
        None, "share of the free memory, after the weights are loaded, that the KV cache may take", metavar="F"
    )
    max_total_tokens: int | None = option(None, "size of the KV cache in tokens; overrides --mem-fraction-static", metavar="N")
    page_size: int | None = option(None, "tokens in a page of the KV cache", metavar="N")
    max_running_requests: int | None = option(None, "most requests that are computed in one step", metavar="N")
    chunked_prefill_size: int | None = option(
        None, "most new tokens of one step: longer prompts are computed in chunks of this size, beside running decodes", metavar="N"
    )
    disable_radix_cache: bool = option(False, "do not reuse the KV cache of prompts that begin alike")
    random_seed: int | None = option(None, "seed of requests that bring none; default: drawn at start", metavar="N")
    num_threads: int | None = option(None, "compute threads on a CPU; default: one a core", metavar="N")

    def __post_init__(self) -> None:
        positive = ("context_length", "max_total_tokens", "page_size", "max_running_requests", "chunked_prefill_size", "num_threads")
        for name in positive:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.mem_fraction_static is not None and not 0.0 < self.mem_fraction_static < 1.0:
            raise ValueError(f"--mem-fraction-static must lie between 0 and 1, got {self.mem_fraction_static}")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        if self.device not in DEVICES:
            raise ValueError(f"--device must be one of {', '.join(DEVICES)}, got {self.device}")
