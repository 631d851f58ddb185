"""`piecework explain`: what is told of a model is what a server does with it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from gguf_models import Kind, write_gguf
from sparse import sparse
from tiny_models import make_tiny_model

from piecework.cli.explain import lines, picture
from piecework.cli.main import main
from piecework.kernels.cpu.native.linear import native_linear
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.explain import (
    Explanation,
    explain,
    lengths_of_file,
    lengths_of_prompts,
    padding_rows,
)
from piecework.runtime.llm import LLM

LAYERS = 3


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "qwen2", "qwen3")),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("model"), request.param, num_hidden_layers=LAYERS
    )


def config(path: Path, **settings: object) -> EngineConfig:
    shared = {
        "model_path": str(path),
        "dtype": "float32",
        "max_total_tokens": 256,
        "num_threads": 1,
    }
    return EngineConfig(**shared | {"piecewise_cuda_graph_compiler": "eager", **settings})  # type: ignore[arg-type]


def check_pieces(told: Explanation) -> None:
    assert [row.calls for row in told.pieces] == [1, LAYERS - 1, 1]
    assert told.split_ops == {"piecework::attention": LAYERS}
    attention = "piecework::attention"
    assert told.stretches == [(0, attention, 1), (1, attention, LAYERS - 1), (2, None, 1)]
    assert "linear x 4" in told.pieces[1].ops
    # Of a layer without biases: four projections and two norms; of the last piece also the last.
    assert [row.num_weights for row in told.pieces][1:] in ([6, 5], [7, 5], [8, 5])
    assert all(row.num_bytes > 0 and row.seconds > 0 for row in told.pieces)
    matches = told.passes["lower"]
    assert matches >= 4 * LAYERS + 1
    (line,) = (line for line in lines(told) if line.startswith("passes: "))
    assert f"lower matched {matches} times" in line
    assert f"{told.pieces[1].before}" in "\n".join(lines(told))
    assert "piecework.silu_and_mul.default" in told.pieces[1].before
    assert "silu" in told.pieces[1].ops and "piecework.silu_and_mul" not in told.pieces[1].ops
    assert "async_tp is off: there is one rank only" in "\n".join(lines(told))


def test_pieces_captures_and_memory(folder: Path) -> None:
    told = explain(
        config(
            folder,
            piecewise_cuda_graph_tokens="4,16",
            cuda_graph_backend_decode="full",
            cuda_graph_bs="1,2",
        )
    )
    check_pieces(told)
    assert {(capture.phase, capture.size) for capture in told.captures} == {
        ("prefill", 4),
        ("prefill", 16),
        ("decode", 1),
        ("decode", 2),
    }
    assert all(capture.seconds is not None and capture.failed is None for capture in told.captures)
    assert told.num_graphs == 2 * (LAYERS + 1) + 2
    assert told.graph_bytes > 0 and told.trace_seconds > 0
    assert json.loads(json.dumps(told.to_json()))["pieces"][1]["calls"] == LAYERS - 1
    assert {row.state for row in told.pieces} == {"compiled"}
    texts = [
        element.text or ""
        for element in ElementTree.fromstring(picture(told)).iter()
        if element.tag.endswith("text")
    ]
    assert [text for text in texts if text.startswith("piece ")] == [
        "piece 0",
        "piece 1",
        "piece 2",
    ]
    assert f"× {LAYERS - 1}" in texts
    assert any("piecework.silu_and_mul" in text for text in texts)
    again = explain(config(folder))
    assert {row.state for row in again.pieces} == {"from the cache"}
    assert all(row.seconds > 0 for row in again.pieces)


def test_a_rank_of_several_with_what_it_sends(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
    passes = "+sequence_parallel,sequence_parallel_tokens=32"
    told = explain(config(path, tp_size=2, passes=passes, piecewise_cuda_graph_tokens="4,35"))
    # Rows of long steps go round.
    assert [(each.size, each.failed) for each in told.captures] == [(4, None), (34, None)]
    short, long = told.forwards
    assert (short.tokens, long.tokens) == (1, 32)
    assert long.passes["sequence_parallel"] == 2 * LAYERS + 1
    assert "long steps" in short.passes_off["sequence_parallel"]
    # Of each sum of 64 numbers in float32, half, and half of the result.
    assert short.sent == short.sent_before == long.sent == (2 * LAYERS + 1) * 64 * 4
    assert [piece for piece, _, _ in long.stretches] == [3, 4, 5]
    assert json.loads(json.dumps(told.to_json()))["forwards"][1]["sent"] == long.sent
    text = "\n".join(lines(told))
    assert "each of 2 ranks sends 1,792 bytes per token as traced, 1,792 after the passes" in text
    assert "order of calls of steps of at least 32 tokens\n    1 x  piece 3" in text
    assert picture(told).count("1,792 bytes sent a token") == 4


def test_steps_with_adapters_beside_those_without(tmp_path: Path) -> None:
    """Rows before their quantisation are read by adapters, so the two are not fused there."""
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
    settings = {"quantization": "int8", "dtype": "bfloat16"} if native_linear() else {}
    told = explain(config(path, enable_lora=True, max_loras=2, **settings))
    without, adapted = told.forwards
    assert [row.adapters for row in told.forwards] == [False, True]
    assert [piece for piece, _, _ in without.stretches] == [0, 1, 2]
    assert [piece for piece, _, _ in adapted.stretches] == [3, 4, 5]
    assert [row.number for row in told.pieces] == list(range(6))
    counts = [row.ops.count("piecework.lora") for row in told.pieces]
    assert counts == [0, 0, 0, 1, 1, 1]
    assert ["lora.default x 4" in row.ops for row in told.pieces] == [False] * 4 + [True, False]
    if settings:
        assert (without.passes["norm_quant"], adapted.passes["norm_quant"]) == (2 * LAYERS, 0)
    text = "\n".join(lines(told))
    assert "passes of steps without adapters: " in text
    assert "order of calls of steps with adapters\n    1 x  piece 3" in text


@pytest.mark.parametrize("quantization", sparse(["auto", "int8", "q8_0"], kept=["int8"]))
@pytest.mark.skipif(native_linear() is None, reason="no CPU kernels")
def test_the_products_of_a_loaded_model_are_overlapped(quantization: str, tmp_path: Path) -> None:
    """Its layers are packed, unlike those of a model that is traced without weights."""
    settings = {"dtype": "bfloat16", "tp_size": 2, "quantization": quantization}
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS, intermediate_size=128)
    passes = "+sequence_parallel,sequence_parallel_tokens=32,+async_tp"
    told = explain(config(path, passes=passes, **settings))
    short, long = told.forwards
    assert long.passes["async_tp"] == 4 * LAYERS and "async_tp" not in short.passes
    text = "\n".join(row.ops for row in told.pieces)
    fused = "native_scaled_linear" if quantization == "int8" else "native_linear"
    assert f"piecework.all_gather_{fused}" in text and f"piecework.{fused}_reduce_scatter" in text
    assert "async_tp is off: sequence_parallel" in "\n".join(lines(told))


def test_a_gguf_file(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)
    write_gguf(folder, tmp_path / "model.gguf", "llama", Kind.F32)
    check_pieces(explain(config(tmp_path / "model.gguf")))


def test_projections_in_bfloat16_that_read_packed_weights_are_captured(tmp_path: Path) -> None:
    told = explain(
        config(
            make_tiny_model(tmp_path / "model"),
            dtype="bfloat16",
            piecewise_cuda_graph_tokens="4,16",
        )
    )
    assert [capture.failed for capture in told.captures] == [None, None]


def test_padding_is_of_the_steps_that_the_server_has_had(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    assert explain(config(path)).lengths is None
    llm = LLM(str(path), dtype="float32", max_total_tokens=256, num_threads=1)
    llm.generate([[7] * 10, [9] * 21], SamplingParams(max_new_tokens=1))
    llm.core._runner.close()  # type: ignore[attr-defined]
    told = explain(config(path, piecewise_cuda_graph_tokens="40"))
    assert told.lengths is not None and told.lengths.counts == {31: 1}
    assert {row.name: row.share for row in told.padding} == pytest.approx(
        {"40": 9 / 40, "default": 1 / 32} | {f"auto:{k}": 0 for k in (4, 8, 16, 32)}
    )
    # To explain is not to serve: nothing is added to what was seen.
    assert explain(config(path)).lengths == told.lengths


def test_padding_is_of_chunks_where_prompts_are_longer() -> None:
    (given, *_) = padding_rows(
        EngineConfig(chunked_prefill_size=100, piecewise_cuda_graph_tokens="50,80"), {230: 2, 40: 1}
    )
    # Chunks of 100 are above the largest size, and run unpadded.
    assert given.share == pytest.approx((2 * 20 + 10) / (2 * 230 + 40 + 50))
    assert given.longer == pytest.approx(4 / 7)


@pytest.mark.parametrize(
    ("text", "counts"), [("7 7, 8", {7: 2, 8: 1}), ('{"7": 2, "8": 1}', {7: 2, 8: 1})]
)
def test_lengths_of_a_file(tmp_path: Path, text: str, counts: dict[int, int]) -> None:
    (tmp_path / "lengths").write_text(text)
    assert lengths_of_file(str(tmp_path / "lengths")).counts == counts


@pytest.mark.parametrize(
    "text", ["", "seven", "0", "-1", "{}", '{"7": 0}', '{"7": "x"}', "{", "1.5"]
)
def test_lengths_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(ValueError, match="--lengths"):
        lengths_of_file(str(tmp_path / "lengths"))


def test_lengths_of_prompts_are_those_of_the_models_tokenizer(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    prompts = ["one", "two apples", "two apples"]
    expected = LLM(str(path), dtype="float32", max_total_tokens=256, num_threads=1).generate(
        prompts, SamplingParams(max_new_tokens=1)
    )
    found = lengths_of_prompts(config(path), "three", prompts)
    assert sorted(found.counts) == sorted({len(done.prompt_ids) for done in expected})
    assert sum(found.counts.values()) == 3


# The command


def command(path: Path, *flags: str) -> int:
    return main(
        [
            "explain",
            "--model-path",
            str(path),
            "--piecewise-cuda-graph-compiler",
            "eager",
            "--num-threads",
            "1",
            *flags,
        ]
    )


def test_the_command_prints_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tiny_model(tmp_path / "model")
    (tmp_path / "lengths").write_text("5 6 7 200")
    assert (
        command(path, "--lengths", str(tmp_path / "lengths"), "--svg", str(tmp_path / "cut.svg"))
        == 0
    )
    printed = capsys.readouterr().out
    assert "4 pieces, 3 of them distinct, split at 3 x piecework::attention" in printed
    assert "2 x  piece 1, then piecework::attention" in printed
    assert "auto:4" in printed
    assert ElementTree.parse(tmp_path / "cut.svg")


def test_the_command_reads_a_data_set_and_prints_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_tiny_model(tmp_path / "model")
    rows = [
        json.dumps({"question": f"How many are {i} apples?", "answer": f"#### {i}"})
        for i in range(8)
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(rows))
    assert (
        command(
            path, "--dataset", "gsm8k", "--data-path", str(tmp_path / "questions.jsonl"), "--json"
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert sum(told["lengths"]["counts"].values()) == 8
    assert [row["name"] for row in told["padding"]] == [
        "default",
        "auto:4",
        "auto:8",
        "auto:16",
        "auto:32",
    ]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--lengths", "/nowhere"], "--lengths /nowhere"),
        (["--svg", "/nowhere/a.svg"], "the folder does not exist"),
        (["--data-path", "x"], "--data-path needs --dataset"),
        (["--disable-cuda-graph"], "leave out the flags"),
        (["--piecewise-cuda-graph-tokens", "x"], "--piecewise-cuda-graph-tokens"),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    tmp_path: Path, flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_tiny_model(tmp_path)
    capsys.readouterr()
    assert command(path, *flags) == 2
    printed = capsys.readouterr().err
    assert (
        printed.startswith("piecework explain: error: ")
        and printed.count("\n") == 1
        and error in printed
    )


def test_a_model_that_cannot_be_traced_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(*_: object) -> None:
        torch._dynamo.graph_break()

    monkeypatch.setattr("piecework.runtime.models.llama.LlamaForCausalLM.forward", breaks)
    assert command(make_tiny_model(tmp_path / "model")) == 1
    printed = capsys.readouterr().err
    assert "piecework explain: error: " in printed and "Traceback" not in printed


def test_text_of_a_long_list_is_shortened(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text(" ".join(map(str, range(1, 200))))
    told = explain(
        config(make_tiny_model(tmp_path / "model")), lengths_of_file(str(tmp_path / "lengths"))
    )
    assert max(len(row.sizes) for row in told.padding) > 12
    for row in told.padding:
        (line,) = (line for line in lines(told) if line.split()[:1] == [row.name])
        shown = [each for each in line.split() if each.isdecimal()][1:]
        ends = row.sizes if len(row.sizes) <= 12 else [*row.sizes[:6], *row.sizes[-6:]]
        assert shown == list(map(str, ends)) and ("..." in line) == (len(row.sizes) > 12)
