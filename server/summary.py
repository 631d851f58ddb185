"""The lines that `piecework serve` prints once it is ready."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from ..runtime.config.engine import EngineConfig
from ..runtime.core.engine_info import EngineInfo, GraphInfo, describe_passes
from ..version import __version__
from .config.server import CommonServerConfig, ServerConfig
from .media.media import Media

_MIB = 2**20
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def summary(
    config: ServerConfig,
    info: EngineInfo,
    port: int,
    seconds: float,
    *,
    rows: Mapping[str, str],
    chat: bool,
    media: Media | None = None,
) -> str:
    """Return what is served, its limits, and a command to try it.

    `rows` are the caller's rows for requests. `chat`: whether the model has a chat template.
    `media` reads its images.
    """
    known = {
        "model": f"{info.architecture}, {info.dtype} on {info.device}, {info.attention_backend} "
        f"attention, {_weights(info)}",
        "KV cache": f"{info.kv_tokens:,} tokens in pages of {info.page_size}, "
        f"{info.kv_bytes / _MIB:,.0f} MiB{_kept_as(info)}",
        **_ranks(info),
        **_replicas(config, info),
        **_adapters(info),
        "context length": f"{info.context_length:,} tokens",
        "running limit": f"{info.max_running_requests:,} requests, {config.max_queued_requests:,} "
        "more may wait",
        "prefill chunk": f"{info.chunked_prefill_size:,} tokens",
    }
    known |= rows
    if media is not None:
        known["images"] = media.described()
    if info.start_seconds:
        known["start-up"] = ", ".join(
            f"{phase} {taken:.1f} s" for phase, taken in _phases(info, seconds).items()
        )
    if (graphs := _graphs(config.engine, info.graphs)) is not None:
        known["graphs"] = graphs
    if info.graphs.passes:
        known["passes"] = describe_passes(info.graphs)
    prompt = "Name the capital of France."
    asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body = {"model": config.model_names[0], **asked, "max_tokens": 64}
    path = "chat/completions" if chat else "completions"
    return table(config, port, seconds, known | info.remarks, path, body)


def table(
    config: CommonServerConfig,
    port: int,
    seconds: float,
    rows: Mapping[str, str],
    path: str,
    body: Mapping[str, Any] | str,
) -> str:
    """Return the summary of any server: its name, its address, `rows`, and a command to try it.

    The command posts `body` as JSON to the endpoint `path`, or a form if it is curl's flags.
    """
    url = base_url(config.host, port)
    lines = "\n".join(f"  {name:<15} {text}" for name, text in rows.items())
    head = (
        f"piecework {__version__} serves {config.model_names[0]} at {url} (ready after "
        f"{seconds:.1f} s)"
    )
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_key or config.api_keys else ""
    if isinstance(body, str):
        return f"\n{head}\n{lines}\n\n  curl {url}/v1/{path}{key} {body}\n"
    command = f"  curl {url}/v1/{path} -H 'Content-Type: application/json'{key}"
    return f"\n{head}\n{lines}\n\n{command} \\\n    -d {shlex.quote(json.dumps(body))}\n"


def _phases(info: EngineInfo, seconds: float) -> dict[str, float]:
    """Return the seconds of each phase of the start; the rest is processes and imports."""
    phases = info.start_seconds | {"captures": info.graphs.capture_seconds}
    long = {phase: taken for phase, taken in phases.items() if taken >= 0.05}
    return long | {"processes": max(0.0, seconds - sum(long.values()))}


def _weights(info: EngineInfo) -> str:
    kept = f" ({'; '.join(info.quantization)})" if info.quantization else ""
    return f"weights {info.weight_bytes / _MIB:,.0f} MiB{kept}"


def _ranks(info: EngineInfo) -> dict[str, str]:
    """Return the memory of each rank, if there are several."""
    if len(info.ranks) < 2:
        return {}
    held = [f"{rank.weight_bytes / _MIB:,.0f} + {rank.kv_bytes / _MIB:,.0f}" for rank in info.ranks]
    each = f"{held[0]} MiB each" if len(set(held)) == 1 else f"{', '.join(held)} MiB"
    return {"ranks": f"{len(held)}, weights + KV cache {each}"}


def _replicas(config: ServerConfig, info: EngineInfo) -> dict[str, str]:
    if config.dp_size == 1:
        return {}
    each = f"{info.kv_tokens:,} tokens of KV cache each"
    return {"replicas": f"{config.dp_size}, {each}; requests go where their prefix is cached"}


def _adapters(info: EngineInfo) -> dict[str, str]:
    """Return the loaded adapters, and how many a step can use, if adapters are on."""
    if info.adapters is None:
        return {}
    names = ", ".join(adapter.name for adapter in info.adapters) or "none loaded"
    return {
        "adapters": f"{names}; {info.adapter_slots} slots for ranks up to {info.adapter_rank}, "
        f"{info.adapter_bytes / _MIB:,.0f} MiB"
    }


def _kept_as(info: EngineInfo) -> str:
    return f", in {info.kv_cache_dtype}" if info.kv_cache_dtype != "auto" else ""


def _graphs(config: EngineConfig, graphs: GraphInfo) -> str | None:
    """Describe the graphs that run steps, or return None if graphs are disabled."""
    if graphs.prefill_backend == graphs.decode_backend == "disabled":
        return None
    asked = f"prefill {graphs.prefill_backend}, decode {graphs.decode_backend}"
    if config.startup == "fast":
        return f"{asked}; brought in while the server answers"
    sizes = [
        f"{len(found)} sizes up to {max(found)} {unit}"
        for found, unit in ((graphs.prefill_sizes, "tokens"), (graphs.decode_sizes, "requests"))
        if found
    ]
    made = [f"{graphs.distinct_pieces} distinct pieces"] * (graphs.distinct_pieces > 0) + sizes
    return "; ".join([asked, *made, f"{graphs.graph_bytes / _MIB:,.0f} MiB"])


def base_url(host: str, port: int) -> str:
    """Return a URL that a client on this machine can open."""
    host = _ANY_ADDRESS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
