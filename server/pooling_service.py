"""The service of `piecework serve` for a pooling model: engine, application and summary."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial

from fastapi import FastAPI

from ..runtime.core.pooling_messages import INPUTS_PER_REQUEST, PoolingInfo
from ..runtime.files.resolve import find_model
from ..runtime.pooling.folder import PoolingFolder, read_folder
from ..runtime.pooling.prompts import Prompts
from ..runtime.tokenizer.tokenizer import load_tokenizer
from .app import BATCH_ROUTERS, COMMON_ROUTERS, OLLAMA_ROUTERS, add_batches, build_app
from .config.pooling import PoolingServerConfig
from .engine.settings import settings_of
from .ollama import embeddings as ollama_embeddings
from .pooling import classify, embeddings, scoring
from .pooling.client import PoolingClient
from .pooling.state import PoolingMetrics, PoolingServing
from .serving.service import Service
from .summary import table

_MIB = 2**20
POOLING_ROUTERS = (
    *(embeddings.router, scoring.router, classify.router),
    *(ollama_embeddings.router, *OLLAMA_ROUTERS),
    *BATCH_ROUTERS,
    *COMMON_ROUTERS,
)
_TASKS = {"embed": "embeddings", "classify": "reranking, scoring and classification"}


def pooling_service(
    config: PoolingServerConfig, process: subprocess.Popen[bytes] | None
) -> Callable[[], Service]:
    """Read the folder and tokenizer. Return a function that makes the service in its event loop.

    `process` is an engine process that waits for its job, or None. Raises `ValueError`.
    """
    folder = read_folder(find_model(config.engine.model_path))
    tokenizer = load_tokenizer(str(folder.path), config.engine.tokenizer_path)

    def make() -> Service:
        engine = PoolingClient(config.engine, tokenizer, **settings_of(config, process))
        summary = partial(pooling_summary, config, folder.prompts)
        return Service(engine, create_pooling_app(engine, config, folder), summary)

    return make


def create_pooling_app(
    engine: PoolingClient, config: PoolingServerConfig, folder: PoolingFolder
) -> FastAPI:
    """Return an application for a pooling model. The caller starts and stops the engine."""
    name = config.model_names[0]
    metrics = PoolingMetrics(engine, name)
    serving = PoolingServing(
        engine=engine, config=config, metrics=metrics, model_name=name, folder=folder
    )
    return add_batches(build_app(serving, POOLING_ROUTERS), serving, config)


def pooling_summary(
    config: PoolingServerConfig, prompts: Prompts, info: PoolingInfo, port: int, seconds: float
) -> str:
    """Return what is served, its limits, and a command to try it."""
    made = f"{info.size:,} numbers" if info.task == "embed" else "a score of each pair"
    if len(info.labels) > 1:
        made = f"{len(info.labels):,} labels (/v1/classify)"
    rows = {
        "task": f"{_TASKS[info.task]} (--runner {config.runner})",
        "model": f"{info.architecture}, {info.dtype} on {info.device}, weights "
        f"{info.weight_bytes / _MIB:,.0f} MiB",
        "pooling": f"{info.pooling}; {made}",
        "longest text": f"{info.context_length:,} tokens",
        "batch": f"{info.token_budget:,} tokens",
        "running limit": f"{info.max_running_requests:,} requests of {INPUTS_PER_REQUEST} texts, "
        f"{config.max_queued_requests:,} more may wait",
    }
    if prompts.texts:
        default = "none" if prompts.default is None else prompts.default
        rows["prompts"] = f"{', '.join(prompts.texts)} (prompt_name); default: {default}"
    if info.task == "embed":
        path, asked = "embeddings", {"input": ["A text.", "Another one."]}
    elif len(info.labels) > 1:
        path, asked = "classify", {"input": ["A text.", "Another one."]}
    else:
        path, asked = "rerank", {"query": "Where is it?", "documents": ["Here.", "Once."]}  # type: ignore[dict-item]
    body = {"model": config.model_names[0], **asked}
    return table(config, port, seconds, rows | info.remarks, path, body)
