"""Flags of vLLM, SGLang and llama.cpp on our command line: those that mean the same are understood,
the others say what to do instead.

Names and meanings: `vllm serve --help` (vllm/engine/arg_utils.py and vllm/config/), SGLang's
docs/advanced_features/server_arguments.md, llama.cpp's tools/server/README.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

_NO_PIPELINE = "pipeline parallelism is not supported; --tp-size splits a model over devices"
_COLLECTIVES = "collectives are chosen for the machine; --tp-size and --ep-size split a model"
_ONE_VALUE = {
    ("--pipeline-parallel-size", "--pp-size", "--pp", "-pp"): (("1",), _NO_PIPELINE),
    ("--tokenizer-mode",): (("auto",), "there is one kind of tokenizer"),
    ("--schedule-policy", "--scheduling-policy"): (
        ("fcfs",),
        "requests run by `priority`, higher first, then by arrival",
    ),
    ("--stream-interval",): (("1",), "each step's tokens are sent at once"),
}
"""Settings that have one value here, and why; giving that one is no mistake."""
NOTHING_TO_DO = (
    "--async-scheduling",
    "--disable-log-requests",
    "--disable-uvicorn-access-log",
    "--enable-auto-tool-choice",
    "--enable-cache-report",
    "--enable-chunked-prefill",
    "--enable-metrics",
    "--enable-priority-scheduling",
    "--enable-prompt-tokens-details",
    "--enable-reasoning",
    "--jinja",
    "--metrics",
    "--no-enable-log-requests",
    "--no-enforce-eager",
    "--no-trust-remote-code",
)
"""What these ask for, or allow, is so anyway."""

_TOOLS = "--tool-call-parser says how calls are written, and nothing else needs a flag"
_LORA = "LoRA adapters are not supported; merge the adapter into its model, and serve that"
_SPECULATION = "speculative decoding is not supported"
_POOLING = "the folder's modules.json and architecture say how states become vectors or scores"
_TLS = "TLS is not spoken; put a reverse proxy in front"
_SIZES = "--cuda-graph-bs and --piecewise-cuda-graph-tokens say which sizes are captured"
_FOLDER_SAYS = "change the model's config.json instead"
_NOT_HERE = {
    "--gpu-memory-utilization": "a share of all memory, weights included, is not what is set here; "
    "--mem-fraction-static F is the share of "
    "the memory left once the weights are loaded that the KV cache takes",
    "--kv-cache-memory-bytes|--num-gpu-blocks-override": "--max-total-tokens N sets the size of "
    "the KV cache, in tokens",
    "--max-prefill-tokens": "--chunked-prefill-size N bounds the new tokens of a step",
    "--no-enable-chunked-prefill": "long prompts are always computed in chunks, of "
    "--chunked-prefill-size tokens",
    "--swap-space|--cpu-offload-gb|--kv-offloading-.*|--enable-hierarchical-cache|"
    "--hicache-.*": "nothing is moved to the host's memory; a "
    "request that gives its pages back is computed again",
    "--compilation-config|-cc|-O.*": "--piecewise-cuda-graph compiles; see `pieces and graphs` in "
    "--help",
    "--cuda-?graph-(capture-)?sizes|--max-cudagraph-capture-size|--max-seq-len-to-capture|"
    "--max-context-len-to-capture": _SIZES,
    "--tool-parser-plugin|--tool-server": _TOOLS,
    "--(enable-)?lora(-.*)?|--max-loras.*|--max-lora-rank|--max-cpu-loras|"
    "--fully-sharded-loras": _LORA,
    "--speculative-.*|--num-speculative-tokens": _SPECULATION,
    "--guided-decoding-.*|--structured-outputs-.*|--grammar-backend": "structured output is "
    "llguidance's, and needs no flag",
    "--convert|--pooler-config|--override-pooler-config": _POOLING,
    "--enable-multimodal|--limit-mm-per-prompt|--mm-.*|--allowed-local-media-path": "images and "
    "audio in requests are not supported",
    "--hf-overrides|--hf-config-path|--json-model-override-args|"
    "--rope-scaling|--rope-theta": _FOLDER_SAYS,
    "--revision|--code-revision|--tokenizer-revision": "fetch that revision into a folder "
    "(huggingface-cli download), and serve the folder",
    "--download-dir": "the variable HF_HUB_CACHE says where models of the hub are kept",
    "--uvicorn-log-level|--log-level-http": "--log-level sets the level of both processes; debug "
    "logs every HTTP request",
    "--enable-log-requests|--log-requests-.*": "--log-requests logs a line for each request, "
    "without what it says",
    "--max-logprobs": "100 log-probabilities a token may be asked for",
    "--ssl-.*": _TLS,
    "--allowed-origins": "--cors-origins lists them",
    "--root-path|--fastapi-root-path": "the server answers at the root; let the reverse proxy take "
    "the prefix away",
    "--base-gpu-id|--gpu-id-step": "the variable CUDA_VISIBLE_DEVICES says which GPU is used",
    "--master-addr|--master-port|--nccl-port|--nccl-init-addr": "--dist-init-addr HOST:PORT says "
    "where the nodes meet",
    "--nccl-.*|--distributed-executor-backend|"
    "--disable-custom-all-reduce|--enable-.*expert.*": _COLLECTIVES,
    "--skip-tokenizer-init": "the tokenizer is always read; prompts of token ids do not go through "
    "it",
    "--skip-server-warmup": "no request of its own runs before the server is ready; leave it out",
    "--temp|--temperature|--top-k|--top-p|--min-p|--repeat-penalty|--presence-penalty|"
    "--frequency-penalty": "a request sets it; --sampling-defaults FOLDER takes defaults from a "
    "generation_config.json",
    "--mmproj|-mm|--mmproj-url|-mmu": "images in requests are not supported",
    "--no-jinja": "chat templates are always rendered by Jinja",
    "-hff|--hf-file": "download the file (piecework pull), and name it with --model-path",
    "-n|--predict|--n-predict": "--default-max-tokens bounds answers whose requests set no limit",
    "-ctk|--cache-type-k|-ctv|--cache-type-v": "--kv-cache-dtype sets the format of the cache",
    "--embedding|--embeddings|--reranking|--rerank|--pooling": "--runner pooling serves an encoder",
    "-md|--model-draft|--draft.*": _SPECULATION,
    "--slot-.*|--slots|--no-slots": "prefixes are shared between all requests, without slots",
    "-sm|--split-mode|-ts|--tensor-split|-mg|--main-gpu": "--tp-size splits a model over devices",
}
"""A pattern of flags that mean nothing here to what to do instead."""
_OF_LLAMA_CPP: dict[tuple[str, ...], tuple[str, Callable[[str], Any]]] = {
    ("-m",): ("model_path", str),
    ("-hf", "-hfr", "--hf-repo"): ("model_path", lambda text: _repository(text)),
    ("-a", "--alias"): ("served_model_name", str),
    ("-c", "--ctx-size"): ("context_length", lambda text: int(text) or None),
    ("-t", "--threads"): ("num_threads", int),
    ("-np", "--parallel"): ("max_running_requests", int),
}
"""Flags of llama.cpp to our setting, and what reads their value."""
_WITHOUT_EFFECT = {
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): "all layers run on --device",
    ("-tb", "--threads-batch"): "--num-threads sets the threads of prompts too",
    ("-b", "--batch-size", "-ub", "--ubatch-size"): "--chunked-prefill-size bounds a step",
}
"""Harmless flags of llama.cpp that are ignored, and what is done instead."""
_FLASH = "--attention-backend sets the kernel of attention"


def add_foreign_flags(parser: Any) -> None:
    """The flags that are understood beside our own; `--help` leaves them out, and what is not
    understood is told by its name.
    """
    for flags, (values, reason) in _ONE_VALUE.items():
        parser.add_argument(
            *flags, action=_Ignored, type=_only(values, reason), help=argparse.SUPPRESS
        )
    for flag in NOTHING_TO_DO:
        parser.add_argument(flag, action=_Ignored, nargs=0, help=argparse.SUPPRESS)
    for names, reason in _WITHOUT_EFFECT.items():
        parser.add_argument(*names, action=partial(_Ignored, reason), help=argparse.SUPPRESS)
    # Its value may be left out; a model's name behind it is an error, not the value.
    parser.add_argument(
        *("-fa", "--flash-attn"),
        action=partial(_Ignored, _FLASH),
        nargs="?",
        const="auto",
        choices=("on", "off", "auto"),
        help=argparse.SUPPRESS,
    )
    for names, (setting, read) in _OF_LLAMA_CPP.items():
        parser.add_argument(
            *names, dest=setting, type=read, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    for short in ("tp", "dp"):
        parser.add_argument(
            f"-{short}",
            type=int,
            dest=f"{short}_size",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    for flag, setting, value in (
        ("--enable-prefix-caching", "disable_radix_cache", False),
        ("--no-enable-prefix-caching", "disable_radix_cache", True),
        ("--no-async-scheduling", "disable_overlap_schedule", True),
        ("--is-embedding", "runner", "pooling"),
        ("--disable-log-stats", "log_stats_interval", 0.0),
    ):
        parser.add_argument(
            flag,
            action="store_const",
            const=value,
            dest=setting,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    parser.add_argument(
        "--task", dest="runner", type=_runner, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    parser.instead_of = instead_of


def instead_of(flag: str) -> str | None:
    """What to do instead of giving a flag that means nothing here; None for one that nobody has."""
    return next((text for pattern, text in _NOT_HERE.items() if re.fullmatch(pattern, flag)), None)


class _Ignored(argparse.Action):
    """A flag that changes nothing; `reason`, where there is one, goes to standard error."""

    def __init__(self, reason: str | None = None, **settings: Any) -> None:
        super().__init__(**{**settings, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS})
        self._reason = reason

    def __call__(
        self,
        parser: Any,
        namespace: Any,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if self._reason is not None:
            print(f"{parser.prog}: {option_string} is ignored: {self._reason}", file=sys.stderr)


def _repository(text: str) -> str:
    repository, _, kind = text.partition(":")
    if kind:
        raise argparse.ArgumentTypeError(
            f"download one .gguf file of {repository} (piecework pull), and name it with "
            f"--model-path; {kind} alone does not say which"
        )
    return repository


def _runner(task: str) -> str:
    """vLLM's older name: the runner that a task needs."""
    if task in ("auto", "generate"):
        return task
    if task in ("embed", "embedding", "classify", "score"):
        return "pooling"
    raise argparse.ArgumentTypeError(f"{task!r} is none of auto, generate, embed, classify, score")


def _only(values: Sequence[str], reason: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(
                f"{reason}; leave it out, or give {' or '.join(values)}, not {text}"
            )
        return text

    return check
