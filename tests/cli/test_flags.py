"""Flags are the config dataclasses: the same names, types, defaults and limits."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.cli.core.flags import (
    ArgumentParser,
    ServerConfig,
    add_config_arguments,
    report,
    server_config,
)
from piecework.cli.core.foreign_flags import add_foreign_flags, instead_of
from piecework.cli.core.foreign_tables import NOTHING_TO_DO
from piecework.cli.main import build_parser
from piecework.cli.serve import describe
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.config.foreign_names import SAME

CONFIGS = (EngineConfig, ServerConfig)
OPTIONS = {
    item.name: (item, get_type_hints(config)[item.name])
    for config in CONFIGS
    for item in dataclasses.fields(config)
    if item.metadata
}
RANGES: dict[str, tuple[Any, Any]] = {
    "dp_size": (1, 64),
    "max_total_tokens": (64, 2**40),
    "num_threads": (1, 1024),
    "speculative_num_draft_tokens": (1, 128),
    "speculative_num_steps": (1, 128),
    "max_loras": (1, 1024),
    "max_lora_rank": (1, 512),
    "mm_encoder_budget": (1, 2**44),
    "mm_cache_bytes": (0, 2**44),
    "max_cpu_loras": (1, 1_000_000),
    "port": (0, 30000),
    "ollama_port": (30001, 65535),
    "max_queued_requests": (0, 10**6),
    "max_header_bytes": (1024, 2**40),
    "watchdog_timeout": (3.0, 1e6),
    "dist_timeout": (1.0, 1e6),
}


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="piecework serve")
    parser.add_model_argument()
    add_config_arguments(parser, *CONFIGS)
    add_foreign_flags(parser)
    return parser


def parse(*argv: str) -> ServerConfig:
    parser = make_parser()
    arguments, unknown = parser.parse_known_args(argv)
    parser.settle(arguments, unknown)
    return server_config(arguments)


def error_of(*argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command line is refused with."""
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("piecework serve: error: ") and error.count("\n") == 1
    return error


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Valid values of one option, by its type."""
    item, hint = OPTIONS[name]
    if name == "speculative_algorithm":
        # Those of heads depend on other settings.
        return st.sampled_from(["auto", "ngram", "prediction", "none"])
    if item.metadata["choices"]:
        return st.sampled_from(item.metadata["choices"])
    if hint in (bool, bool | None):
        return st.just(True)
    sizes = st.lists(st.integers(1, 4096), min_size=1).map(
        lambda numbers: ",".join(map(str, numbers))
    )
    if name == "piecewise_cuda_graph_tokens":
        return st.integers(1, 99).map("auto:{}".format) | sizes
    if name == "cuda_graph_bs":
        return sizes
    if name == "passes":
        return st.sampled_from(["auto", "none,+lower", "+norm_quant,-noop"])
    if name == "cpu_bind":
        return st.sampled_from(["auto", "none", "0-15,16-31", "0-7,32-39|8-15,40-47"])
    if name == "otlp_traces_endpoint":
        return st.sampled_from(["http://127.0.0.1:4318", "https://collector.example/v1/traces"])
    if name == "served_model_name":
        return st.sampled_from(["a", "org/model", "first,second"])
    if name == "kv_events_config":
        return st.sampled_from(["{}", '{"endpoint": "ipc:///tmp/events", "hwm": 5}'])
    if name == "dist_init_addr":
        return st.sampled_from(["10.0.0.1:29500", "[fe80::1]:29500", "node-0:1"])
    if name == "cors_origins":
        return st.sampled_from(
            ["*", "https://a.example", "http://a.example:8080,http://[::1]:5173"]
        )
    if name == "mcp_allow":
        return st.sampled_from(["mcp.example.com", "localhost:8000,10.0.0.0/8"])
    if name == "allow_remote_media":
        return st.sampled_from(["*", "files.example.com,10.0.0.0/8"])
    if name == "limit_mm_per_prompt":
        return st.sampled_from(["image=0", "image=4,video=0", '{"image": 4}'])
    if name == "lora_modules":
        return st.sampled_from(["sql=./a", "sql=./a,chat=org/b", "./a"])
    if name == "kv_host_memory":
        return st.sampled_from(["16M", "1.5G"])
    if name == "kv_disk":
        return st.sampled_from(["/var/kv", "kv:64G", "~/kv:1t"])
    if name == "api_key":
        return st.text(st.characters(categories=["L", "N"]), min_size=1)
    if hint in (int, int | None):
        return st.integers(*RANGES.get(name, (1, 2**40)))
    if hint in (float, float | None):
        return st.floats(*RANGES.get(name, (0.0, 1.0)), exclude_min=True, exclude_max=True)
    return st.text(st.characters(min_codepoint=33, max_codepoint=0x3FF), min_size=1).filter(
        lambda text: not text.startswith("-")
    )


def agree(settings: dict[str, Any]) -> bool:
    """Whether no two of them contradict each other."""
    backends = settings.get("piecewise_cuda_graph") and (
        settings.get("cuda_graph_backend_prefill", "piecewise") != "piecewise"
    )
    tiers = settings.keys() & {"kv_disk", "kv_host_memory"} and settings.get("tp_size", 1) > 1
    towers = settings.keys() >= {"mmproj", "disable_vision"} and settings["disable_vision"]
    return not (backends or tiers or towers)


# Files of keys are read when the settings are made: test_api_key.py has them, test_tracing.py the
# endpoint. Nodes and groups of experts go together with ranks: test_nodes.py has them.
# The folder of images must exist: tests/server/media/test_sources.py has it.
# Logits processors exclude ranks and speculation: tests/runtime/sampling/test_plug_ins.py has them.
ELSEWHERE = {"api_key_file", "api_keys", "otlp_traces_endpoint", "nnodes", "node_rank", "ep_size",
             "logits_processors", "allowed_local_media_path"}  # fmt: skip
SETTINGS = st.fixed_dictionaries(
    {}, optional={name: values_of(name) for name in OPTIONS if name not in ELSEWHERE}
).filter(agree)


@given(SETTINGS)
def test_a_command_line_gives_the_config_it_spells(settings: dict[str, Any]) -> None:
    argv = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        argv += [flag] if value is True else [flag, str(value)]
    engine = {
        name: settings.pop(name)
        for name in list(settings)
        if name in {item.name for item in dataclasses.fields(EngineConfig)}
    }
    assert parse(*argv) == ServerConfig(engine=EngineConfig(**engine), **settings)


def test_a_vision_tower_and_no_vision_contradict_one_another() -> None:
    with pytest.raises(ValueError, match="--mmproj loads what --disable-vision leaves out"):
        parse("--mmproj", "tower.gguf", "--disable-vision")


def test_help_tells_every_flag_and_every_default() -> None:
    text = " ".join(make_parser().format_help().split())
    for name, (item, hint) in OPTIONS.items():
        assert f" --{name.replace('_', '-')} " in text
        assert (
            "default" in item.metadata["help"]
            or hint is bool
            or f"{item.metadata['help']}; default: {item.default}" in text
        )


def test_every_option_stands_under_a_heading() -> None:
    text = make_parser().format_help()
    headings = {
        line.removesuffix(":")
        for line in text.splitlines()
        if line.endswith(":") and not line.startswith(" ")
    }
    assert headings == {"options", "positional arguments"} | {
        item.metadata["group"] for item, _ in OPTIONS.values()
    }


@pytest.mark.parametrize(
    ("model_path", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("/models/Llama-3-8B/", "Llama-3-8B"),
        ("a/b.Q4_1.gguf", "b.Q4_1"),
        ("org/model", "model"),
    ],
)
def test_the_model_is_served_under_its_path_s_last_name(model_path: str, name: str) -> None:
    assert parse("--model-path", model_path).served_model_name == name


def test_a_given_model_name_wins() -> None:
    assert parse("--model-path", "a/b", "--served-model-name", "c").served_model_name == "c"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "65536"),
        ("--port", "-1"),
        ("--max-queued-requests", "-1"),
        ("--drain-timeout", "-0.5"),
        ("--drain-timeout", "inf"),
        ("--drain-timeout", "nan"),
        ("--watchdog-timeout", "1"),
        ("--api-key", ""),
        ("--page-size", "0"),
        ("--mem-fraction-static", "1"),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_flag_s_name(flag: str, value: str) -> None:
    with pytest.raises(ValueError, match=flag):
        parse(f"{flag}={value}")


@pytest.mark.parametrize(
    "argv", [["--port", "many"], ["--dtype", "int4"], ["--port"], ["--drain-timeout", "soon"]]
)
def test_a_value_of_the_wrong_kind_is_one_line(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert argv[0] in error_of(*argv, capsys=capsys)


@pytest.mark.parametrize(
    ("unknown", "answer"),
    [
        (["--modle-path", "x"], "unknown flag --modle-path; did you mean --model-path?"),
        (
            ["--max-total-token=5"],
            "unknown flag --max-total-token; did you mean --max-total-tokens?",
        ),
        (["--zzz"], "unknown flag --zzz; `piecework serve --help` lists them"),
        (["model", "stray"], "unexpected argument 'stray'"),
    ],
)
def test_an_unknown_flag_names_the_closest(
    unknown: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(*unknown, capsys=capsys) == f"piecework serve: error: {answer}\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["m"],
        ["m", "--port", "1"],
        ["--port", "1", "m"],
        ["--model", "m"],
        ["--model-path=m"],
        ["--model-path", "m", "m"],
    ],
)
def test_the_model_is_the_first_argument_or_a_flag(argv: list[str]) -> None:
    assert parse(*argv).engine.model_path == "m"


@pytest.mark.parametrize(
    "argv", [["a", "--model-path", "b"], ["--model-path", "b", "--port", "1", "a"]]
)
def test_two_models_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "MODEL a and --model-path b differ; give one" in error_of(*argv, capsys=capsys)


@pytest.mark.parametrize("name", SAME)
def test_a_foreign_flag_means_what_its_own_name_means(name: str) -> None:
    own, value = SAME[name], [] if SAME[name] == "disable_cuda_graph" else ["7"]
    others = ["--tp-size", "7"] * (own == "ep_size")
    assert (
        parse(f"--{name.replace('_', '-')}", *value, *others)
        == parse(f"--{own.replace('_', '-')}", *value, *others)
        != parse(*others)
    )
    assert f"--{name.replace('_', '-')} " not in make_parser().format_help()


@pytest.mark.parametrize(
    ("foreign", "own"),
    [
        (["--dtype", "half"], ["--dtype", "float16"]),
        (["--dtype=float"], ["--dtype=float32"]),
        (["--kv-cache-dtype", "fp8"], ["--kv-cache-dtype", "fp8_e4m3"]),
        (["--max-model-len", "auto"], []),
        (["--max-model-len", "1k"], ["--context-length", "1000"]),
        (["--max-model-len", "25.6k"], ["--context-length", "25600"]),
        (["--max-num-batched-tokens", "2K"], ["--chunked-prefill-size", "2048"]),
        (["--no-enable-prefix-caching"], ["--disable-radix-cache"]),
        (["--enable-prefix-caching"], []),
        (["--tensor-parallel-size=2"], ["--tp-size", "2"]),
        (["--tp", "2"], ["--tp-size", "2"]),
        (["-tp", "2"], ["--tp-size", "2"]),
        (["--data-parallel-size", "2"], ["--dp-size", "2"]),
        (["-dp", "2"], ["--dp-size", "2"]),
        (["--no-async-scheduling"], ["--disable-overlap-schedule"]),
        (
            [
                "--tp",
                "1",
                "-pp",
                "1",
                "--kv-cache-dtype",
                "auto",
            ],
            [],
        ),
        (["--schedule-policy", "fcfs"], []),
        ([*NOTHING_TO_DO], []),
        (
            ["-m", "x", "-c", "4096", "-t", "3"],
            ["x", "--context-length", "4096", "--num-threads", "3"],
        ),
        (["-c", "0"], []),
        (["-hf", "a/b", "--alias", "c"], ["a/b", "--served-model-name", "c"]),
        (["-np", "4"], ["--max-running-requests", "4"]),
        (["-ngl", "99", "-tb", "2", "-fa", "on"], []),
        (["-fa", "-ub", "512"], []),
        (
            ["--load-format", "safetensors", "--quantization", "awq_marlin"],
            ["--quantization", "awq"],
        ),
        (["-np", "-1", "-t", "-1", "-s", "-1"], []),
        (["-c", "4k"], ["--context-length", "4000"]),
        (["--no-webui", "-cb", "--mlock", "--no-mmap", "--numa", "isolate"], ["--no-page"]),
        (["-v", "--no-warmup", "--flash-attn", "off", "--log-colors", "on"], []),
        (["--reasoning-format", "none"], ["--reasoning-parser", "none"]),
        (["--rerank"], ["--runner", "pooling"]),
        (["--enable-deterministic-inference"], ["--batch-invariant"]),
        (["--enable-piecewise-cuda-graph"], ["--piecewise-cuda-graph"]),
        (["--enforce-piecewise-cuda-graph"], ["--piecewise-cuda-graph"]),
        (
            [
                *("--model", "m", "--tp", "2", "--enable-piecewise-cuda-graph"),
                *("--piecewise-cuda-graph-compiler", "eager"),
                *("--piecewise-cuda-graph-max-tokens", "4096", "--cuda-graph-bs", "1", "2", "4"),
                "--disable-custom-all-reduce",
            ],
            [
                *("m", "--tp-size", "2", "--piecewise-cuda-graph"),
                *("--piecewise-cuda-graph-compiler", "eager"),
                *("--piecewise-cuda-graph-max-tokens", "4096", "--cuda-graph-bs", "1,2,4"),
            ],
        ),
        (["--bucket-e2e-request-latency", "1", "2", "--numa", "x"], []),
        (["--served-model-name", "a", "b", "--model", "m"], ["m", "--served-model-name", "a,b"]),
        (["--served-model-name", "a", "b"], ["b", "--served-model-name", "a"]),
        (["m", "--alias", "a,b"], ["m", "--served-model-name", "a,b"]),
        (["--cuda-graph-bs", "1", "2", "4", "m"], ["m", "--cuda-graph-bs", "1,2,4"]),
        (["--piecewise-cuda-graph-tokens", "[16, 32]"], ["--piecewise-cuda-graph-tokens", "16,32"]),
        (["--passes", "none", "+lower", "m"], ["m", "--passes", "none,+lower"]),
        (["--cpu-bind", "0-1", "2-3", "--tp", "2"], ["--cpu-bind", "0-1,2-3", "--tp-size", "2"]),
        (["--allowed-origins", '["*"]'], ["--cors-origins", "*"]),
        (
            ["--cors-origins", "http://a.example", "http://b.example", "m"],
            ["m", "--cors-origins", "http://a.example,http://b.example"],
        ),
    ],
)
def test_foreign_values_are_read_as_their_servers_read_them(
    foreign: list[str], own: list[str]
) -> None:
    assert parse(*foreign) == parse(*own)


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        (["--pp", "2"], "--tp-size splits a model over devices; leave it out, or give 1, not 2"),
        (
            ["--schedule-policy", "lpm"],
            "requests run by `priority`, highest first, then by arrival",
        ),
        (
            ["--gpu-memory-utilization", "0.9"],
            "--mem-fraction-static F, the share of the memory left after loading the weights",
        ),
        (["--gpu-memory-utilization=0.9"], "--mem-fraction-static"),
        (["model", "--max-prefill-tokens", "8192"], "--chunked-prefill-size N limits"),
        (["--kv-cache-memory-bytes", "1"], "--max-total-tokens N"),
        (["-O3"], "--piecewise-cuda-graph compiles"),
        (["--uvicorn-log-level", "debug"], "--log-level sets"),
        (["--tool-parser-plugin", "x.py"], "--tool-call-parser"),
        (["--temp", "0.2"], "--temp is not a flag of piecework: set it in the request"),
        (["-hf", "a/b:Q4_K_M"], "Q4_K_M does not name one file of a/b"),
        (["--mmproj-url", "x"], "set which images requests may have"),
        (["-c", "abc"], "argument -c/--ctx-size: 'abc' is not a whole number"),
        (["-np", "x"], "-np/--parallel: 'x' is not a whole number"),
        (["--allowed-origins", "[*"], "'[*' is not a JSON list"),
        (["--offline"], "HF_HUB_OFFLINE=1"),
        (["-fa", "model"], "invalid choice: 'model'"),
        (["-d", "2"], "unknown flag -d"),
    ],
)
def test_what_means_nothing_here_is_told_by_its_name(
    argv: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in error_of(*argv, capsys=capsys)


@pytest.mark.parametrize("flag", ["-temp", "--top-n", "--keep", "--propped"])
def test_a_flag_that_is_like_none_of_ours_gets_no_guess(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "did you mean" not in error_of(flag, "1", capsys=capsys)


FOREIGN = (Path(__file__).parent / "foreign_flags.txt").read_text(encoding="utf-8").splitlines()


def test_every_flag_of_other_servers_is_understood_ignored_or_told_what_to_do_instead() -> None:
    parser = ArgumentParser(prog="piecework serve", add_help=False)
    describe(parser)
    known = {name for action in parser._actions for name in action.option_strings}
    flags = [flag for line in FOREIGN if not line.startswith("#") for flag in line.split()]
    assert len(flags) > 900
    assert [flag for flag in flags if flag not in known and instead_of(flag) is None] == []


@pytest.mark.parametrize("argv", [["-ngl", "99"], ["--mlock"], ["-fa"], ["--numa", "isolate"]])
def test_a_flag_that_is_ignored_says_what_is_done_instead(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parse(*argv)
    told = capsys.readouterr().err
    assert told.startswith(f"piecework serve: {argv[0]} is ignored: ") and told.count("\n") == 1


@pytest.mark.parametrize("text", ["4.5", "1.0001k", "nan", "infk", "k", "", "1e3", "4096 tokens"])
def test_what_is_no_whole_number_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a whole number" in error_of("--context-length", text, capsys=capsys)


def test_a_report_is_one_line_whatever_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("piecework serve", ValueError("two\n  lines")) == 2
    assert capsys.readouterr().err == "piecework serve: error: two lines\n"


def test_time_and_memory_shares_are_numbers() -> None:
    config = parse("--drain-timeout", "1.5", "--mem-fraction-static", "0.25")
    assert math.isclose(config.drain_timeout, 1.5) and config.engine.mem_fraction_static == 0.25


@pytest.mark.parametrize(
    ("config", "algorithm", "path"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 4}', "ngram", None),
        ('{"method": "eagle3", "model": "org/head"}', "eagle3", "org/head"),
        ('{"method": "mtp", "num_speculative_tokens": 1}', "nextn", None),
        ('{"model": "org/small"}', "auto", "org/small"),
    ],
)
def test_methods_of_vllm_are_algorithms(config: str, algorithm: str, path: str | None) -> None:
    engine = parse("--model-path", "m", "--speculative-config", config).engine
    assert (engine.speculative_algorithm, engine.speculative_draft_model_path) == (algorithm, path)


@pytest.mark.parametrize("value", ["EAGLE3", "eagle3"])
def test_algorithms_are_understood_in_capitals(value: str) -> None:
    flags = ("--speculative-algorithm", value, "--speculative-draft-model-path", "org/head")
    assert parse("--model-path", "m", *flags).engine.speculative_algorithm == "eagle3"


@pytest.mark.parametrize("command", ["peers", "roofline", "graphs"])
def test_measurements_take_the_model_as_the_first_argument(command: str) -> None:
    arguments, unknown = build_parser().parse_known_args(["bench", command, "m"])
    arguments.parser.settle(arguments, unknown)
    assert arguments.model_path == "m"
