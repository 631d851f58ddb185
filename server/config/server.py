"""The settings of the HTTP server."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ...runtime.config.engine import RANKS, EngineConfig
from ...runtime.config.kv_events import KVEventsConfig
from ...runtime.config.options import check_options, option
from ...runtime.process.logs import LOG_FORMATS
from ..engine.spawn import LANGUAGE_MODEL
from ..observability.otlp import read_endpoint
from .api_key import checked_key, read_api_key
from .changes import ChangesConfig
from .http_limits import HttpLimits
from .keys import read_keys
from .mcp_allow import McpConfig
from .media import MediaConfig
from .ollama_port import OllamaPort

LOG_LEVELS = ("debug", "info", "warning", "error")
SERVER = "server"
MOST_REPLICAS = 64
RUNNERS = ("auto", "generate", "pooling")
_MIN_WATCHDOG = 3  # Seconds. The engine sends a heartbeat every second.


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonServerConfig(HttpLimits, OllamaPort):
    """Settings that every server has, whatever kind of model it serves. Raises `ValueError`.

    Attributes:
        engine_command: The command that starts the engine process.
    """

    engine_command: ClassVar[Sequence[str]]
    host: str = option(
        "127.0.0.1",
        "address to listen on; 0.0.0.0 accepts requests from other machines",
        group=SERVER,
        metavar="ADDRESS",
    )
    port: int = option(30000, "port to listen on; 0 picks a free port", group=SERVER, metavar="N")
    api_key: str | None = option(
        None,
        "key that requests must send as `Authorization: Bearer KEY`; /health needs none; every "
        "user of this machine can see flags, so prefer --api-key-file or PIECEWORK_API_KEY; "
        "default: no key",
        group=SERVER,
        metavar="KEY",
    )
    api_key_file: str | None = option(
        None,
        "file that holds the key, instead of --api-key; default: none",
        group=SERVER,
        metavar="FILE",
    )
    api_keys: str | None = option(
        None,
        "file with several keys, as hashes, and the limits of each key: models, requests and "
        "tokens per minute, concurrency, priority; `piecework key` makes a line; SIGHUP reads "
        "the file again; default: none",
        group=SERVER,
        metavar="FILE",
    )
    cors_origins: str = option(
        "",
        "origins (https://a.example,http://localhost:5173) whose pages may call this server from "
        "a browser, or * for all; default: none",
        group=SERVER,
        metavar="LIST",
        items=r"\*|[a-z][a-z0-9+.-]*://.*",
    )
    no_page: bool = option(
        False, "do not serve the page at / (chats, images and metrics in a browser)", group=SERVER
    )
    served_model_name: str = option(
        "",
        "names of the model in requests and in /v1/models (a,b); answers have the first name; "
        "default: the last part of --model-path",
        group=SERVER,
        metavar="NAMES",
        items=r"[^-].*",
    )
    require_model: bool = option(
        False,
        "refuse chats, completions and messages without a model name, as OpenAI and Anthropic do; "
        "default: they use the served model",
        group=SERVER,
    )
    max_queued_requests: int = option(
        512,
        "maximum number of waiting requests; further ones get 503 with Retry-After",
        group=SERVER,
        metavar="N",
    )
    drain_timeout: float = option(
        30.0,
        "seconds that running requests have to finish when the server stops",
        group=SERVER,
        metavar="SECONDS",
    )
    watchdog_timeout: float = option(
        300.0,
        "seconds without a heartbeat after which the engine process counts as hung and is "
        "restarted; 0: never",
        group=SERVER,
        metavar="SECONDS",
    )
    log_level: str = option(
        "info",
        "log level; debug also logs every HTTP request",
        group=SERVER,
        choices=LOG_LEVELS,
    )
    log_format: str = option(
        "text",
        "log format of all processes: text, or json with one object per line",
        group=SERVER,
        choices=LOG_FORMATS,
    )
    log_requests: bool = option(
        False,
        "log one line when a request ends: tokens and times, no content",
        group=SERVER,
    )
    log_stats_interval: float = option(
        10.0,
        "seconds between two log lines of throughput while a language model has traffic; "
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
        self.check_ollama_port(self.port)
        if self.max_queued_requests < 0:
            raise ValueError(
                f"--max-queued-requests must be at least 0, got {self.max_queued_requests}"
            )
        if not 0 <= self.drain_timeout < float("inf"):
            raise ValueError(f"--drain-timeout must be 0 or more seconds, got {self.drain_timeout}")
        if not 0 <= self.log_stats_interval < float("inf"):
            raise ValueError(
                "--log-stats-interval must be at least 0 seconds (0 turns it off), got "
                f"{self.log_stats_interval}"
            )
        if self.watchdog_timeout != 0 and not _MIN_WATCHDOG <= self.watchdog_timeout < float("inf"):
            raise ValueError(
                f"--watchdog-timeout must be 0 (off) or at least {_MIN_WATCHDOG} seconds, got "
                f"{self.watchdog_timeout}"
            )
        check_options(self, ("batch_storage", "responses_store_size"))
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("--api-key and --api-key-file cannot be combined; omit one of them")
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
            path = self.engine.model_path
            name = os.path.basename(os.path.abspath(path)).removesuffix(".gguf") or path
            object.__setattr__(self, "served_model_name", name)
        if not all(self.model_names):
            raise ValueError(
                f"--served-model-name {self.served_model_name!r} has an empty name; remove the "
                "extra comma"
            )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may call the model by. Answers have the first one."""
        return tuple(dict.fromkeys(name.strip() for name in self.served_model_name.split(",")))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchServerConfig(CommonServerConfig):
    """Settings of a server with files and batches."""

    batch_dir: str = option(
        "auto",
        "folder that keeps the files and batches of /v1/files and /v1/batches; auto: a folder "
        "named after the model in the cache folder; none: these endpoints are off",
        group=SERVER,
        metavar="FOLDER",
    )
    batch_storage: int = option(
        2048,
        "maximum size of files and batches together, in MiB",
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
class ServerConfig(BatchServerConfig, McpConfig, MediaConfig, ChangesConfig):
    """Settings of a server for a language model."""

    engine_command = LANGUAGE_MODEL
    chat_template: str | None = option(
        None,
        "Jinja template that turns a chat into a prompt, or a file with one; default: the model's "
        "template",
        group=SERVER,
        metavar="FILE",
    )
    tool_call_parser: str = option(
        "auto",
        "format of the model's tool calls: hermes, llama3_json, openai (gpt-oss), ... or generic; "
        "docs/agents.md lists all; auto: detected from the chat template",
        group=SERVER,
        metavar="NAME",
    )
    reasoning_parser: str = option(
        "auto",
        "format of the model's reasoning: think (also deepseek_r1, qwen3, glm45), gpt_oss, ... or "
        "none; docs/agents.md lists all; auto: detected from the chat template",
        group=SERVER,
        metavar="NAME",
    )
    sampling_defaults: str = option(
        "model",
        "sampling parameters for requests that do not set them. model: from the model's "
        "generation_config.json or .gguf file; openai: temperature 1, top_p 1; or a folder with "
        "another generation_config.json",
        group=SERVER,
        metavar="model|openai|FOLDER",
    )
    default_max_tokens: int = option(
        16384,
        "maximum tokens of a chat's answer if the request sets no limit and the sampling defaults "
        "have no max_new_tokens",
        group=SERVER,
        metavar="N",
    )
    kv_share: str = option(
        "key",
        "which requests find one another's cached prefixes: key, those with the same key of "
        "--api-keys; all, those of all keys, whose users can then measure what others have asked",
        group=SERVER,
        choices=("key", "all"),
    )
    sse_ping_interval: float = option(
        15.0,
        "seconds without output after which a stream sends a comment, or `event: ping` for "
        "clients of Anthropic's API, so that proxies do not close it; 0: never",
        group=SERVER,
        metavar="SECONDS",
    )
    responses_store: str = option(
        "auto",
        "SQLite file in which /v1/responses keeps responses; memory: until the server ends; off: "
        "do not keep them; auto: a file for this model and port in the cache folder",
        group=SERVER,
        metavar="FILE",
    )
    responses_store_size: int = option(
        256,
        "maximum size of stored responses, in MiB; the least recently used are deleted first",
        group=SERVER,
        metavar="MIB",
    )
    responses_store_days: float = option(
        30.0,
        "days after which an unused stored response is deleted",
        group=SERVER,
        metavar="DAYS",
    )
    profile_dir: str | None = option(
        None,
        "folder for the torch.profiler traces of /start_profile and /stop_profile; default: these "
        "endpoints are off",
        group=SERVER,
        metavar="FOLDER",
    )
    runner: str = option(
        "auto",
        "use of the model: generate (text) or pooling (vectors or scores); auto: pooling for "
        "folders with modules.json, encoders and classifiers",
        group=SERVER,
        choices=RUNNERS,
    )
    dp_size: int = option(
        1,
        "number of replicas: engines with the whole model, each with its own devices or a share "
        "of the cores; a request goes to the replica that has its prefix, unless it is overloaded",
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
        if not 0 <= self.sse_ping_interval < float("inf"):
            raise ValueError(
                "--sse-ping-interval must be at least 0 seconds (0 turns it off), got "
                f"{self.sse_ping_interval}"
            )
        if not self.responses_store:
            raise ValueError("--responses-store is empty; name a file, memory, off or auto")
        if not 0 < self.responses_store_days < float("inf"):
            raise ValueError(
                "--responses-store-days must be a number of days above 0, got "
                f"{self.responses_store_days}"
            )
        self.check_mcp()
        self.check_media()
        if not 1 <= self.dp_size <= MOST_REPLICAS:
            raise ValueError(
                f"--dp-size must lie between 1 and {MOST_REPLICAS}, got {self.dp_size}"
            )
        tokens = self.engine.max_total_tokens
        if tokens is not None and 0 < tokens < self.dp_size:
            raise ValueError(
                f"--max-total-tokens {tokens} is shared by {self.dp_size} replicas (--dp-size), "
                "which is less than one token for each; raise it"
            )
        if self.dp_size > 1 and self.engine.nnodes > 1:
            raise ValueError(
                "--dp-size and --nnodes cannot be combined: run one server per replica, behind a "
                "router"
            )
        if self.engine.kv_events_config is not None:
            KVEventsConfig.parse(self.engine.kv_events_config).check_replicas(self.dp_size)
        if self.engine.tp_size > 1 and self.watchdog_timeout:
            # A timeout of ranks names the rank that hangs, the watchdog cannot. It must come first.
            seconds = min(self.engine.dist_timeout, self.watchdog_timeout / 2)
            object.__setattr__(self, "engine", replace(self.engine, dist_timeout=seconds))


def parse_origins(text: str) -> list[str]:
    """Parse `--cors-origins`. Raises `ValueError` for an item that is not an origin."""
    origins = [origin.strip() for origin in text.split(",") if origin.strip()]
    for origin in origins:
        if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s*]+", origin) is None:
            raise ValueError(
                f"--cors-origins: {origin!r} is not an origin; write it as https://a.example or "
                "http://localhost:5173, without a path"
            )
    return origins
