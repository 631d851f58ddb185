"""The settings of the HTTP server."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ...runtime.cache.kv_events import KVEventsConfig
from ...runtime.config.engine import RANKS, EngineConfig
from ...runtime.config.options import check_options, option
from ...runtime.process.logs import LOG_FORMATS
from ..engine.spawn import LANGUAGE_MODEL
from ..observability.otlp import read_endpoint
from .api_key import checked_key, read_api_key
from .http_limits import HttpLimits
from .keys import read_keys

LOG_LEVELS = ("debug", "info", "warning", "error")
SERVER = "server"
MOST_REPLICAS = 64
RUNNERS = ("auto", "generate", "pooling")
_LEAST_WATCHDOG = 3
"""Seconds: an engine gives a sign of life every second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonServerConfig(HttpLimits):
    """Settings of one server, its engine's included, that do not depend on what it serves. Raises
    `ValueError` with a remedy.

    `engine_command`: what starts the process of its kind of engine.
    """

    engine_command: ClassVar[Sequence[str]]
    host: str = option(
        "127.0.0.1",
        "address to listen on; 0.0.0.0 takes requests from other machines",
        group=SERVER,
        metavar="ADDRESS",
    )
    port: int = option(30000, "port to listen on; 0 takes a free one", group=SERVER, metavar="N")
    api_key: str | None = option(
        None,
        "requests must carry this key as `Authorization: Bearer KEY`; /health stays open; every "
        "user of this machine sees a flag: "
        "give it by --api-key-file or PIECEWORK_API_KEY instead; default: no key",
        group=SERVER,
        metavar="KEY",
    )
    api_key_file: str | None = option(
        None,
        "a file that holds the key, instead of --api-key; default: none",
        group=SERVER,
        metavar="FILE",
    )
    api_keys: str | None = option(
        None,
        "a file of several keys, as hashes, with what requests with each may do: models, requests "
        "and tokens a minute, how many at once, priority; read again at SIGHUP; `piecework key` "
        "makes a line of it; default: none",
        group=SERVER,
        metavar="FILE",
    )
    cors_origins: str = option(
        "",
        "origins (https://a.example,http://localhost:5173) whose pages may call this server from a "
        "browser, * for all; default: none",
        group=SERVER,
        metavar="LIST",
        items=r"\*|[a-z][a-z0-9+.-]*://.*",
    )
    no_page: bool = option(
        False, "no page at /, with chats, images and figures, for browsers", group=SERVER
    )
    served_model_name: str = option(
        "",
        "the model's names in requests and in /v1/models (a,b); answers have the first one; "
        "default: the last part of --model-path",
        group=SERVER,
        metavar="NAMES",
        items=r"[^-].*",
    )
    require_model: bool = option(
        False,
        "refuse chats, completions and messages that name no model, as OpenAI and Anthropic do; "
        "default: they mean the model that is here",
        group=SERVER,
    )
    max_queued_requests: int = option(
        512,
        "requests that may wait beyond those running; more are answered 503 with Retry-After",
        group=SERVER,
        metavar="N",
    )
    drain_timeout: float = option(
        30.0,
        "seconds that running requests get to finish when the server is told to stop",
        group=SERVER,
        metavar="SECONDS",
    )
    watchdog_timeout: float = option(
        300.0,
        "seconds without a sign of life after which the engine process is taken to hang, and is "
        "started again; 0: never",
        group=SERVER,
        metavar="SECONDS",
    )
    log_level: str = option(
        "info",
        "how much to log; debug logs every HTTP request too",
        group=SERVER,
        choices=LOG_LEVELS,
    )
    log_format: str = option(
        "text",
        "form of the log: text, or json, an object a line, of every process of the server",
        group=SERVER,
        choices=LOG_FORMATS,
    )
    log_requests: bool = option(
        False,
        "log a line for each request at its end: tokens and times, and nothing of what it says",
        group=SERVER,
    )
    log_stats_interval: float = option(
        10.0,
        "seconds between two lines of throughput in the log while a language model has traffic; "
        "0: no such lines",
        group=SERVER,
        metavar="SECONDS",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "send a trace of each request to this OpenTelemetry collector "
        "(http://HOST:4318/v1/traces, grpc://HOST:4317); needs the extra otlp; default: none",
        group=SERVER,
        metavar="URL",
    )
    engine: Any

    def __post_init__(self) -> None:
        HttpLimits.__post_init__(self)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must lie between 0 and 65535, got {self.port}")
        if self.max_queued_requests < 0:
            raise ValueError(
                f"--max-queued-requests must be at least 0, got {self.max_queued_requests}"
            )
        if not 0 <= self.drain_timeout < float("inf"):
            raise ValueError(f"--drain-timeout must be 0 or more seconds, got {self.drain_timeout}")
        if not 0 <= self.log_stats_interval < float("inf"):
            raise ValueError(
                "--log-stats-interval must be 0, which logs none, or more seconds, got "
                f"{self.log_stats_interval}"
            )
        if self.watchdog_timeout != 0 and not _LEAST_WATCHDOG <= self.watchdog_timeout < float(
            "inf"
        ):
            raise ValueError(
                "--watchdog-timeout must be 0, which watches nothing, or at least "
                f"{_LEAST_WATCHDOG} seconds, got {self.watchdog_timeout}"
            )
        check_options(self, ("batch_storage", "responses_store_size"))
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("--api-key and --api-key-file both give a key; leave one of them out")
        if self.api_key is not None:
            object.__setattr__(self, "api_key", checked_key(self.api_key, "--api-key"))
        if self.api_key_file is not None:
            object.__setattr__(self, "api_key", read_api_key(self.api_key_file))
            object.__setattr__(self, "api_key_file", None)
        if self.api_keys is not None:
            read_keys(self.api_keys)
        parse_origins(self.cors_origins)
        if self.otlp_traces_endpoint is not None:
            read_endpoint(self.otlp_traces_endpoint)
        if not self.served_model_name:
            object.__setattr__(self, "served_model_name", _last_name(self.engine.model_path))
        if not all(self.model_names):
            raise ValueError(
                f"--served-model-name {self.served_model_name!r} has an empty name; leave out the "
                "comma beside it"
            )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may call the model by. Answers have the first one."""
        return tuple(dict.fromkeys(name.strip() for name in self.served_model_name.split(",")))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchServerConfig(CommonServerConfig):
    """Settings of a server that takes files and batches."""

    batch_dir: str = option(
        "auto",
        "folder for the files and batches of /v1/files and /v1/batches, which outlive the server; "
        "auto: one of the model's name in the cache folder; none: these endpoints are off",
        group=SERVER,
        metavar="FOLDER",
    )
    batch_storage: int = option(
        2048,
        "MiB that files and batches may take together",
        group=SERVER,
        metavar="MIB",
    )

    def __post_init__(self) -> None:
        CommonServerConfig.__post_init__(self)
        if not self.batch_dir:
            raise ValueError("--batch-dir is empty; name a folder, auto or none")
        if os.path.isfile(self.batch_dir):
            raise ValueError(f"--batch-dir {self.batch_dir} is a file; name a folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(BatchServerConfig):
    """Settings of a server of a language model."""

    engine_command = LANGUAGE_MODEL
    chat_template: str | None = option(
        None,
        "Jinja template that turns a chat into a prompt, or a file with it; default: the model's "
        "own",
        group=SERVER,
        metavar="FILE",
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls: hermes, llama3_json, openai (gpt-oss), ... or generic; "
        "docs/agents.md lists all; auto: as its chat template writes them",
        group=SERVER,
        metavar="NAME",
    )
    reasoning_parser: str = option(
        "auto",
        "how the model writes its thoughts: think (also deepseek_r1, qwen3, glm45), gpt_oss, ... "
        "or none; docs/agents.md lists all; auto: as its chat template writes them",
        group=SERVER,
        metavar="NAME",
    )
    sampling_defaults: str = option(
        "model",
        "sampling parameters of requests that name none: model: what the model's "
        "generation_config.json or .gguf file says; openai: temperature 1, top_p 1; or a folder "
        "with another generation_config.json",
        group=SERVER,
        metavar="model|openai|FOLDER",
    )
    default_max_tokens: int = option(
        16384,
        "longest answer, in tokens, of a chat that names no limit, unless the sampling defaults "
        "have a max_new_tokens",
        group=SERVER,
        metavar="N",
    )
    responses_store: str = option(
        "auto",
        "SQLite file in which /v1/responses keeps responses; memory: until the server ends; off: "
        "not at all; auto: one of the model and the port in the cache folder",
        group=SERVER,
        metavar="FILE",
    )
    responses_store_size: int = option(
        256,
        "MiB of stored responses; those that were not used for longest go first",
        group=SERVER,
        metavar="MIB",
    )
    responses_store_days: float = option(
        30.0,
        "days after which a stored response goes that was not used",
        group=SERVER,
        metavar="DAYS",
    )
    profile_dir: str | None = option(
        None,
        "folder for traces of torch.profiler, which /start_profile and /stop_profile then make; "
        "default: these endpoints are off",
        group=SERVER,
        metavar="FOLDER",
    )
    runner: str = option(
        "auto",
        "what the model is for: generate writes text, pooling makes vectors or scores; auto: "
        "pooling for folders with modules.json, encoders and classifiers",
        group=SERVER,
        choices=RUNNERS,
    )
    dp_size: int = option(
        1,
        "replicas: how many engines, each with the whole model and its share of the cores, or its "
        "own devices; requests go where their prefix is cached, unless it has too much to do",
        group=RANKS,
        metavar="N",
    )
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        BatchServerConfig.__post_init__(self)
        if self.profile_dir is not None and not self.profile_dir.strip():
            raise ValueError("--profile-dir is empty; name a folder, or leave it out")
        if self.profile_dir is not None and os.path.isfile(self.profile_dir):
            raise ValueError(f"--profile-dir {self.profile_dir} is a file; name a folder")
        if not self.sampling_defaults.strip():
            raise ValueError("--sampling-defaults is empty; give model, openai or a folder")
        if self.default_max_tokens < 1:
            raise ValueError(
                f"--default-max-tokens must be at least 1, got {self.default_max_tokens}"
            )
        if not self.responses_store:
            raise ValueError("--responses-store is empty; name a file, memory, off or auto")
        if not 0 < self.responses_store_days < float("inf"):
            raise ValueError(
                "--responses-store-days must be a number of days above 0, got "
                f"{self.responses_store_days}"
            )
        if not 1 <= self.dp_size <= MOST_REPLICAS:
            raise ValueError(
                f"--dp-size must lie between 1 and {MOST_REPLICAS}, got {self.dp_size}"
            )
        tokens = self.engine.max_total_tokens
        if tokens is not None and 0 < tokens < self.dp_size:
            raise ValueError(
                f"--max-total-tokens {tokens} is of all {self.dp_size} replicas (--dp-size) "
                "together, and less than one for each; raise it"
            )
        if self.dp_size > 1 and self.engine.nnodes > 1:
            raise ValueError(
                "--dp-size and --nnodes cannot be combined: give each replica's machines a server "
                "of their own, behind a router"
            )
        if self.engine.kv_events_config is not None:
            KVEventsConfig.parse(self.engine.kv_events_config).check_replicas(self.dp_size)
        if self.engine.tp_size > 1 and self.watchdog_timeout:
            # Ranks tell who hangs, the watchdog only that something does.
            seconds = min(self.engine.dist_timeout, self.watchdog_timeout / 2)
            object.__setattr__(self, "engine", replace(self.engine, dist_timeout=seconds))


def parse_origins(text: str) -> list[str]:
    """What `--cors-origins` lists. Raises `ValueError` for what no browser sends as its origin."""
    origins = [origin.strip() for origin in text.split(",") if origin.strip()]
    for origin in origins:
        if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s*]+", origin) is None:
            raise ValueError(
                f"--cors-origins: {origin!r} is no origin such as https://a.example or "
                "http://localhost:5173, without a path"
            )
    return origins


def _last_name(model_path: str) -> str:
    return os.path.basename(os.path.abspath(model_path)).removesuffix(".gguf") or model_path
