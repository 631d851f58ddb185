"""The command lines of `piecework bench`; what a measurement needs is imported when it runs."""

from __future__ import annotations

import argparse
from typing import Any

from ..runtime.config import DTYPES, PIECE_COMPILERS
from .bench_attack import add_attack
from .bench_flags import DEFAULT_URL, add_json, add_measurement, count, given, positive
from ..bench.target import Api, Target
from ..bench.workloads import DATASETS, PROMPT_KINDS, Workload

_GSM8K = """\
Few-shot GSM8K, with the prompts, stops and answer extraction of SGLang's few_shot_gsm8k, and its four lines at the end:
Accuracy, Invalid (share of answers without a number), Latency, Output throughput (by the tokens that the server counts).
The examples are the first --num-shots questions of the file, and the questions are counted from its start too, as there.
Temperature is 0. A request that fails counts as wrong; failures are listed, and the exit code is then 1.
"""
_GSM8K_EXAMPLES = """\
examples:
  %(prog)s --num-questions 200
  %(prog)s --base-url http://127.0.0.1:8000 --api chat --parallel 32 --data-path test.jsonl
  %(prog)s --base-url http://127.0.0.1:30000 --compare http://127.0.0.1:8000 --json result.json
"""
_SERVING = """\
A fixed load on any OpenAI-compatible server, and how fast it answers.
--request-rate R sends requests at the times of a Poisson process; inf, all at once. --max-concurrency bounds how many are under way;
with --request-rate inf and a bound C, C clients each send their next request as soon as they have an answer.

TTFT  time to first token, from sending the request
TPOT  time of each further token: (last token - first token) / (tokens - 1), one figure a request
ITL   gap between two events that brought tokens, all requests together
E2E   from sending the request to its end
"""
_SERVING_EXAMPLES = """\
examples:
  %(prog)s --random-input-len 256 --random-output-len 64 --ignore-eos --max-concurrency 8 --num-prompts 32
  %(prog)s --dataset shared-prefix --prefix-len 640 --random-input-len 96 --random-output-len 32 --ignore-eos --max-concurrency 8
  %(prog)s --dataset gsm8k --request-rate 4 --num-prompts 100 --json result.json
"""
_SOAK = """\
Many requests of mixed shapes (short and long prompts, text and token ids, shared beginnings; completions, chat, /generate; streamed or
not; n, log-probabilities, stop strings, seeds), among them clients that disconnect and requests that are aborted at random moments.
Every answer is checked for its form and its counts. --verify requests, greedy or seeded ones, are first asked alone; their answers under
load should be the same. In bfloat16 two tokens that nearly tie may fall the other way in another batch, so differences are told, and
fail the soak only above --max-mismatches; with a server in float32 give 0.
--kill-engine and --hang-engine do that to the engine process meanwhile; the load begins again until all is done.
At the end the server must say that nothing runs, nothing waits, and no request holds KV cache. Exit code 0 or 1.
"""
_SOAK_EXAMPLES = """\
examples:
  %(prog)s --num-requests 2000 --concurrency 64
  %(prog)s --num-requests 300 --max-mismatches 0 --server-pid 4711 --max-memory-growth 50
"""

_PEERS = """\
Starts Piecework, then each --server, on this machine, one after the other; puts the same loads on each, and prints a table: out tok/s of
single (128 tokens in, 128 out, one at a time), batch8 and batch32 (256 in, 64 out, 8 and 32 at a time) and prefix (640 shared and 96 own
in, 32 out, 8 at a time), in tok/s of prefill (1,024 in, 1 out, 4 at a time), seconds to the first token, memory, and Piecework's ratio to
the best of the others. The command of a server is given a port as its last word, or where it says {port}.
"""
_PEERS_EXAMPLES = """\
examples:
  %(prog)s --loads single,batch8
  %(prog)s --server llama=./llama.sh --server 'vllm=vllm serve DIR --port {port}' --json peers.json
"""
_PEERS_LOADS = ("single", "batch8", "batch32", "prefill", "prefix")
_GRAPHS_PARTS = ("prefill", "decode", "compile", "ready", "faults")
_GRAPHS = """\
What --piecewise-cuda-graph gains and costs, in Markdown tables; the engine runs in this process, no server is needed.

prefill  forwards of one prompt, graphs off and in pieces, run in turn; the least time of --repeats runs each
decode   the same of steps of nothing but decodes
compile  tracing and compiling a model of the same layers at several depths, and loading what a first start has left in the cache
ready    seconds from the start of the engine's process until it takes requests, --startup fast against graphs off
faults   only where asked for: cold starts of a server while a stream runs, with a compiler that fails: its longest gap between two tokens
"""
_GRAPHS_EXAMPLES = """\
examples:
  %(prog)s --json graphs.json
  %(prog)s --parts prefill --prefill 16,64 --dtype float32 --num-threads 1
"""


def add_bench_parsers(subparsers: Any) -> None:
    """Add `gsm8k`, `serving`, `soak`, `peers` and `graphs` to the subparsers of `piecework bench`.

    Each sets `func`, which takes the parsed arguments and returns the exit code: 0, 1 where requests failed, 2 where the user can mend it;
    and `parser`, its own.
    """
    _add_gsm8k(subparsers)
    _add_serving(subparsers)
    _add_soak(subparsers)
    _add_peers(subparsers)
    _add_graphs(subparsers)
    add_attack(subparsers)


def _add_gsm8k(subparsers: Any) -> None:
    parser = add_measurement(subparsers, "gsm8k", "few-shot GSM8K accuracy of one server or two", _GSM8K, _GSM8K_EXAMPLES, _run_gsm8k)
    _add_target(parser)
    parser.add_argument("--compare", metavar="URL", help="ask a second server the same afterwards; tells the paired difference in accuracy")
    group = parser.add_argument_group("questions")
    _add_gsm8k_file(group)
    group.add_argument("--num-shots", type=count, default=5, metavar="N", help="worked examples before each question; default: 5")
    group.add_argument("--num-questions", type=positive, default=200, metavar="N", help="default: 200")
    group.add_argument("--max-new-tokens", type=positive, default=512, metavar="N", help="longest answer in tokens; default: 512")
    group.add_argument("--parallel", type=positive, default=128, metavar="N", help="requests under way at once; default: 128")


def _add_serving(subparsers: Any) -> None:
    parser = add_measurement(subparsers, "serving", "latency and throughput under a fixed load", _SERVING, _SERVING_EXAMPLES, _run_serving)
    _add_target(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=positive, default=200, metavar="N", help="requests to measure; default: 200")
    load.add_argument("--request-rate", type=_rate, default=float("inf"), metavar="R", help="requests a second, or inf; default: inf")
    load.add_argument("--max-concurrency", type=positive, metavar="N", help="requests under way at once; default: no bound")
    load.add_argument("--num-warmups", type=count, default=1, metavar="N", help="requests sent one by one beforehand; default: 1")
    load.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    load.add_argument("--ignore-eos", action="store_true", help="answers go on to their full length; Piecework, SGLang and vLLM know this")
    load.add_argument(
        "--no-stream", dest="stream", action="store_false", help="wait for whole answers; there is no TTFT, TPOT and ITL then"
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and times of arrival; default: 0")
    _add_prompts(parser.add_argument_group("prompts"))


def _add_prompts(group: Any) -> None:
    group.add_argument("--dataset", choices=DATASETS, default="random", help="default: random")
    group.add_argument("--random-input-len", type=positive, default=1024, metavar="N", help="tokens of a random prompt; default: 1024")
    group.add_argument("--random-output-len", type=positive, default=128, metavar="N", help="tokens asked for behind it; default: 128")
    group.add_argument(
        "--random-range-ratio",
        type=_ratio,
        default=0.0,
        metavar="F",
        help="draw each length L from L (1 - F) to L (1 + F), as in vLLM's benchmark; default: 0, exactly L",
    )
    group.add_argument(
        "--prefix-len", type=positive, default=512, metavar="N", help="shared-prefix: shared tokens before them; default: 512"
    )
    group.add_argument("--num-prefixes", type=positive, default=1, metavar="N", help="shared-prefix: different beginnings; default: 1")
    group.add_argument(
        "--prompt-kind",
        choices=PROMPT_KINDS,
        help="random prompts as token ids, of exact lengths, or as words, about one token each; default: token-ids, for a chat words",
    )
    group.add_argument("--vocab-size", type=positive, metavar="N", help="token ids are below this; default: as /get_model_info tells")
    group.add_argument("--num-shots", type=count, default=5, metavar="N", help="gsm8k: worked examples before each question; default: 5")
    group.add_argument(
        "--output-len", type=positive, metavar="N", help="gsm8k, sharegpt-file: most tokens; default: 512, and about the recorded reply's"
    )
    _add_gsm8k_file(group, "; sharegpt-file: the ShareGPT JSON")


def _add_soak(subparsers: Any) -> None:
    parser = add_measurement(
        subparsers, "soak", "mixed requests, disconnects and aborts; is all right, does anything leak", _SOAK, _SOAK_EXAMPLES, _run_soak
    )
    _add_target(parser, api=False)
    mix = parser.add_argument_group("requests")
    mix.add_argument("--num-requests", type=positive, default=2000, metavar="N", help="default: 2000")
    mix.add_argument("--concurrency", type=positive, default=64, metavar="N", help="requests under way at once; default: 64")
    mix.add_argument("--apis", type=_apis, default=tuple(Api), metavar="LIST", help="default: completion,chat,generate")
    mix.add_argument("--disconnect-rate", type=_ratio, default=0.1, metavar="F", help="share whose client leaves; default: 0.1")
    mix.add_argument("--abort-rate", type=_ratio, default=0.05, metavar="F", help="share aborted by /abort_request; default: 0.05")
    mix.add_argument("--max-prompt-words", type=positive, default=400, metavar="N", help="longest prompt; default: 400")
    mix.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="most tokens of one sequence; default: 64")
    mix.add_argument("--vocab-size", type=positive, metavar="N", help="token ids are below this; default: as /get_model_info tells")
    mix.add_argument("--seed", type=int, default=0, metavar="N", help="of all requests; default: 0")
    checks = parser.add_argument_group("checks")
    checks.add_argument("--verify", type=count, default=40, metavar="N", help="answers to compare with the same request alone; default: 40")
    checks.add_argument("--max-mismatches", type=count, metavar="N", help="how many of them may differ; default: any number")
    checks.add_argument("--settle-seconds", type=float, default=10.0, metavar="S", help="in which the server becomes idle; default: 10")
    checks.add_argument("--server-pid", type=positive, metavar="PID", help="watch the memory of this process and of those it started")
    checks.add_argument(
        "--max-memory-growth", dest="max_memory_growth_mib", type=float, metavar="MIB", help="since the first quarter; default: any"
    )
    faults = parser.add_argument_group("faults, of the engine process of the server that --server-pid names, here")
    faults.add_argument("--kill-engine", dest="kills", type=count, default=0, metavar="N", help="times that it is killed; default: 0")
    faults.add_argument("--hang-engine", dest="hangs", type=count, default=0, metavar="N", help="times that it is stopped; default: 0")
    faults.add_argument("--fault-interval", type=float, default=32.0, metavar="S", help="three within 60 s end a server; default: 32")


def _add_peers(subparsers: Any) -> None:
    parser = add_measurement(
        subparsers, "peers", "Piecework beside other servers: speed, start-up, memory", _PEERS, _PEERS_EXAMPLES, _run_peers
    )
    parser.add_argument(
        "--server", dest="servers", action="append", type=_server, default=[], metavar="NAME=COMMAND", help="another server"
    )
    parser.add_model_argument()
    parser.add_argument("--model-path", metavar="PATH", help="what Piecework serves; default: smollm2-135m")
    parser.add_argument(
        "--vocab-size", type=positive, metavar="N", help="token ids of prompts are below this; default: 49152, smollm2-135m's"
    )
    parser.add_argument("--loads", type=_loads, metavar="LIST", help="default: single,batch8,batch32,prefill,prefix")
    parser.add_argument("--scaling", action="store_true", help="also 1, 2, 4, ... 64 at a time, 128 tokens in and 64 out")
    parser.add_argument(
        "--rounds",
        type=positive,
        metavar="N",
        help="start and load every server so many times, in turn, and take its best figures; default: 1",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of prompts; default: 0")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables there too")
    parser.add_argument("--plot", metavar="FILE", help="draw the scaling run there, PNG or SVG; needs matplotlib")
    add_json(parser)


def _add_graphs(subparsers: Any) -> None:
    parser = add_measurement(
        subparsers, "graphs", "what compiled pieces gain and cost on this machine; needs no server", _GRAPHS, _GRAPHS_EXAMPLES, _run_graphs
    )
    parser.add_model_argument()
    parser.add_argument("--model-path", metavar="PATH", help="default: smollm2-135m")
    parser.add_argument("--dtype", choices=DTYPES, help="default: auto")
    parser.add_argument("--compiler", choices=PIECE_COMPILERS, help="what compiles the pieces; default: by device")
    parser.add_argument("--num-threads", type=positive, metavar="N", help="compute threads; default: one a core")
    parser.add_argument("--parts", type=_parts, metavar="LIST", help="default: prefill,decode,compile,ready")
    parser.add_argument("--prefill", type=_numbers, metavar="LIST", help="tokens of prefills; default: 16,64,256,512")
    parser.add_argument("--batch-sizes", type=_numbers, metavar="LIST", help="sequences of decodes; default: 1,8")
    parser.add_argument("--context", type=positive, metavar="N", help="tokens of each sequence that is decoded; default: 256")
    parser.add_argument("--layers", type=_numbers, metavar="LIST", help="depths whose compile times are compared; default: 8,30,60")
    parser.add_argument("--repeats", type=positive, metavar="N", help="runs of each step; default: 30")
    parser.add_argument("--starts", type=positive, metavar="N", help="starts of each kind; default: 3")
    add_json(parser)


def _add_target(parser: Any, *, api: bool = True) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", default=DEFAULT_URL, metavar="URL", help=f"default: {DEFAULT_URL}")
    if api:
        group.add_argument(
            "--api",
            type=Api,
            choices=list(Api),
            metavar="API",
            default=Api.COMPLETION,
            help="completion (/v1/completions), chat (/v1/chat/completions) or generate (SGLang's /generate); default: completion",
        )
    group.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    group.add_argument("--api-key", metavar="KEY", help="sent as `Authorization: Bearer KEY`; default: none")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds that one request may take; default: 600")
    group.add_argument(
        "--no-keep-alive", dest="keep_alive", action="store_false", help="a connection for each request, for servers that reset used ones"
    )
    add_json(parser)


def _add_gsm8k_file(group: Any, more: str = "") -> None:
    group.add_argument(
        "--data-path",
        metavar="FILE",
        help="JSONL with question and answer on each line; default: GSM8K's test set, downloaded once to ~/.cache/piecework" + more,
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def _server(text: str) -> tuple[str, str]:
    label, _, command = text.partition("=")
    if not label or not command.strip():
        raise argparse.ArgumentTypeError(f"{text!r} should be a name and a command, NAME=COMMAND")
    return label, command


def _loads(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if not set(names) <= set(_PEERS_LOADS):
        raise argparse.ArgumentTypeError(f"{text!r} should be some of {','.join(_PEERS_LOADS)}")
    return tuple(names)


def _parts(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if not set(names) <= set(_GRAPHS_PARTS):
        raise argparse.ArgumentTypeError(f"{text!r} should be some of {','.join(_GRAPHS_PARTS)}")
    return tuple(names)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} should be requests a second, above 0, or inf")
    return value


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number from 0 to 1")
    return value


def _apis(text: str) -> tuple[Api, ...]:
    names = text.split(",")
    if not set(names) <= set(Api):
        raise argparse.ArgumentTypeError(f"{text!r} should be some of {','.join(Api)}")
    return tuple(map(Api, names))


def _run_gsm8k(arguments: argparse.Namespace) -> int:
    from ..bench.gsm8k import Gsm8kSettings, run
    from ..bench.report import Report

    return run(given(Target, arguments), given(Gsm8kSettings, arguments), arguments.compare, Report(arguments.json))


def _run_serving(arguments: argparse.Namespace) -> int:
    from ..bench.report import Report
    from ..bench.serving import ServingSettings, run

    chat = arguments.api is Api.CHAT
    if chat and arguments.prompt_kind == "token-ids":
        raise ValueError("--prompt-kind token-ids: a chat takes text; choose words, or another --api")
    workload = given(Workload, arguments, kind=arguments.prompt_kind or ("words" if chat else "token-ids"))
    return run(given(Target, arguments), given(ServingSettings, arguments), workload, Report(arguments.json))


def _run_peers(arguments: argparse.Namespace) -> int:
    from ..bench.peers import PeersSettings, run
    from ..bench.report import Report

    chosen = {name: value for name, value in vars(arguments).items() if value is not None}
    return run(given(PeersSettings, argparse.Namespace(**chosen)), Report(arguments.json))


def _run_soak(arguments: argparse.Namespace) -> int:
    from ..bench.report import Report
    from ..bench.soak import SoakSettings, run
    from ..bench.soak_requests import Mix

    return run(given(Target, arguments), given(SoakSettings, arguments), given(Mix, arguments), Report(arguments.json))


def _run_graphs(arguments: argparse.Namespace) -> int:
    from ..bench.graphs import GraphsSettings, run
    from ..bench.report import Report

    chosen = {name: value for name, value in vars(arguments).items() if value is not None}
    return run(given(GraphsSettings, argparse.Namespace(**chosen)), Report(arguments.json))
