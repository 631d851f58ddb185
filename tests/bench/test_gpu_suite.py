"""The GPU suite, run on a CPU with tiny shapes: every part reports, and one that fails holds up no
other.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_pages import page_of

from piecework.bench import gpu_attention, gpu_diffusion, gpu_peer, gpu_suite
from piecework.bench.gpu_checks import correctness, made_up_step
from piecework.bench.gpu_engines import TINY, LeftOut, milliseconds
from piecework.bench.gpu_models import _model_checks, two_ranks
from piecework.bench.gpu_parts import PARTS, Part
from piecework.bench.gpu_report import markdown
from piecework.kernels.attention import KVLayout
from piecework.kernels.cpu.platform import CpuPlatform


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    # Of the parts' processes.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def suite(output: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON that was written, and the Markdown beside it; a process for each part."""
    code = gpu_suite.main(["--device", "cpu", "--tiny", "--output", str(output), *flags])
    (written,) = output.glob("*.json")
    return code, json.loads(written.read_text()), written.with_suffix(".md").read_text()


def measured(folder: Path, *names: str) -> tuple[dict[str, Any], str]:
    """What parts give in this process, as it is written, and its page."""
    found = {name: PARTS[name](TINY, folder / name, "cpu") for name in names}
    results = json.loads(json.dumps(found))
    return results, page_of(results)


@pytest.mark.slow
def test_parts_report(tmp_path: Path) -> None:
    parts, page = measured(
        tmp_path, "attention", "prefill_off", "decode_full", "load_off", "load_no_overlap"
    )
    rows = parts["attention"]["rows"]
    assert len(rows) == 5 and all(row["native"] > 0 and row["torch"] > 0 for row in rows.values())
    assert "## Attention of one layer (ms)" in page and "| step | native | torch |" in page
    assert [row["tokens"] for row in parts["prefill_off"]["rows"]] == [16, 32]
    assert all(
        row["ms"] > 0 and row["flops"] > 0 and not row["replayed"]
        for row in parts["prefill_off"]["rows"]
    )
    assert all(row["replayed"] and row["bytes"] > 0 for row in parts["decode_full"]["rows"])
    assert (
        parts["load_off"]["output_tokens_per_second"] > 0
        and parts["load_off"]["cached_share"] > 0.5
    )
    assert parts["load_no_overlap"]["overlapped_steps"] == 0
    assert "| batch | full |" in page


@pytest.mark.parametrize(
    ("module", "part", "package"),
    [
        (gpu_diffusion, partial(gpu_diffusion.diffusion, False), "diffusers"),
        (gpu_peer, gpu_peer.load_vllm, "vllm"),
    ],
)
def test_parts_that_need_an_absent_package_are_left_out(
    module: ModuleType, part: Part, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(LeftOut, match=f"{package} is not installed"):
        part(TINY, tmp_path, "cpu")


@pytest.mark.slow
def test_a_failing_part_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that cannot run on this machine: a CPU records no graphs between two points."""
    packages = stand_in(tmp_path, "raise ImportError('built for another torch')")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    )
    code, report, page = suite(tmp_path / "out", "--parts", "load_vllm,prefill_breakable,floors")
    parts = report["parts"]
    assert code == 1 and [part["ok"] for part in parts.values()] == [False, True, True]
    assert "built for another torch" in parts["load_vllm"]["error"]
    assert "## load_vllm failed" in page and "| load_vllm | **FAILED** |" in page
    assert parts["prefill_breakable"].keys() == {"ok", "seconds", "left_out"}
    assert "| prefill_breakable | left out: cpu records no graphs |" in page
    assert "prefill_breakable failed" not in page


def test_vllm_gets_the_same_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(stand_in(tmp_path, VLLM))
    try:
        result = gpu_peer.load_vllm(TINY, tmp_path / "model", "cpu")
    finally:
        sys.modules.pop("vllm", None)
    assert result["finished"] == TINY.num_requests and result["cached_share"] == 0.0
    assert (
        round(result["output_tokens_per_second"] * result["seconds"])
        == TINY.num_requests * TINY.output_len
    )


VLLM = '''
"""Takes what vLLM 0.32's constructor, parameters and `generate` take, by name,
of what the suite uses; answers with zeros."""
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.32.0"


class SamplingParams:
    def __init__(self, *, temperature=1.0, max_tokens=16, ignore_eos=False, detokenize=True):
        assert temperature == 0.0 and ignore_eos
        self.max_tokens = max_tokens


class LLM:
    def __init__(
        self, model, *, skip_tokenizer_init=False, dtype="auto",
        load_format="auto", max_model_len=None, max_num_seqs=None, enable_prefix_caching=None,
    ):
        assert (Path(model) / "config.json").exists() and load_format == "dummy"
        assert skip_tokenizer_init and enable_prefix_caching
        self.beginnings = set()

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        hits = [tuple(prompt[:600]) in self.beginnings for prompt in ids]
        self.beginnings |= {tuple(prompt[:600]) for prompt in ids}
        zeros = SimpleNamespace(token_ids=[0] * sampling_params.max_tokens)
        return [SimpleNamespace(outputs=[zeros], num_cached_tokens=600 * hit) for hit in hits]

    def reset_prefix_cache(self):
        self.beginnings.clear()
        return True
'''


def stand_in(folder: Path, text: str) -> Path:
    """A folder with a package named vllm, for the beginning of the path."""
    (folder / "packages" / "vllm").mkdir(parents=True)
    (folder / "packages" / "vllm" / "__init__.py").write_text(text)
    return folder / "packages"


def test_transformers_gets_the_same_load(tmp_path: Path) -> None:
    result = gpu_peer.load_transformers(TINY, tmp_path, "cpu")
    assert (
        result["finished"] == result["requests"] == TINY.num_requests
        and result["steps"] >= TINY.output_len
    )
    assert (
        round(result["output_tokens_per_second"] * result["seconds"])
        == TINY.num_requests * TINY.output_len
    )


def test_a_peer_that_takes_too_long_is_cut_short_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of steps do not fit into two seconds; what came in them counts."""
    monkeypatch.setattr(gpu_peer, "_LOAD_SECONDS", 2.0)
    scale = replace(TINY, num_requests=60, output_len=1000)
    result = gpu_peer.load_transformers(scale, tmp_path, "cpu")
    assert result["finished"] < result["requests"] == 60
    tokens = result["output_tokens_per_second"] * result["seconds"]
    assert (
        tokens == pytest.approx(round(tokens))
        and result["finished"] * 1000 <= round(tokens) < 60 * 1000
    )
    page = page_of({"load_transformers": result})
    assert (
        f"Cut short after {result['seconds']:.0f} s, when {result['finished']} of 60 requests were "
        "finished" in page
    )


def test_diffusion_is_measured(tmp_path: Path) -> None:
    parts, page = measured(tmp_path, "diffusion_eager")
    result = parts["diffusion_eager"]
    assert result["step_ms"] > 0 and result["first_ms"] > 0
    assert "## Diffusion" in page and "| eager |" in page


def test_ops_are_measured_beside_the_copy_rate(tmp_path: Path) -> None:
    parts, page = measured(tmp_path, "floors", "ops")
    ops = parts["ops"]
    assert ops["errors"] == {} and {row["tokens"] for row in ops["rows"]} == {1, 16}
    assert all(row["microseconds"]["torch"] > 0 and row["bytes"] > 0 for row in ops["rows"])
    assert (
        "| op | tokens | torch |" in page
        and page.count("| gated activation |") == 2
        and "%" in page.partition("| norm | 1 |")[2]
    )


def test_each_version_of_an_op_has_its_column_and_the_share_of_its_floor() -> None:
    row = {
        "op": "norm",
        "tokens": 16,
        "bytes": 2e6,
        "microseconds": {"torch": 8.0, "sgl-kernel": 4.0},
    }
    results = {
        "floors": {"copy_bytes_per_second": 1e12, "matmul_flops_per_second": 1e12},
        "ops": {"rows": [row], "errors": {"norm, x": "why"}},
    }
    about = dict.fromkeys(
        ("device", "date", "scale", "python", "torch", "cuda", "triton", "piecework"), "x"
    )
    page = markdown(
        {
            "about": about,
            "parts": {
                name: {"ok": True, "seconds": 1.0, "result": result}
                for name, result in results.items()
            },
        }
    )
    assert (
        "| op | tokens | torch | sgl-kernel |" in page
        and "| norm | 16 | 8.00 25% | 4.00 50% |" in page
        and "- norm, x: why" in page
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_part(tmp_path: Path) -> None:
    code, report, page = suite(tmp_path)
    left_out = [name for name, part in report["parts"].items() if "left_out" in part]
    assert left_out == ["prefill_breakable", "load_vllm"] and code == 0, report
    assert list(report["parts"]) == gpu_suite._part_names()
    assert all(check["ok"] for check in report["parts"]["correctness"]["result"]["checks"])
    assert (
        report["parts"]["startup_warm"]["result"]["distinct_pieces"]
        == report["parts"]["startup_cold"]["result"]["distinct_pieces"]
        > 0
    )
    for heading in (
        "Floors",
        "Correctness",
        "Prefill",
        "Decode",
        "Load in the shape of GSM8K",
        "Start-up",
        "Diffusion",
    ):
        assert f"## {heading}" in page


def test_a_part_that_takes_too_long_is_ended_and_told(tmp_path: Path) -> None:
    _, report, _ = suite(tmp_path, "--parts", "load_off,floors", "--budget", "0.2")
    assert "not done within 0 s" in report["parts"]["load_off"]["error"]
    assert report["parts"]["floors"]["error"] == "no time was left"


def test_what_measures_nothing_runs_side_by_side() -> None:
    """But checks do not share their time with compilers."""
    names = ["floors", "correctness", "two_ranks", "inductor_pieces", "ops", "hardware_tests"]
    assert gpu_suite._turns(names) == [
        ["floors"],
        ["correctness", "two_ranks"],
        ["inductor_pieces", "hardware_tests"],
        ["ops"],
    ]
    assert gpu_suite._turns(["ops", "hardware_tests"]) == [["ops"], ["hardware_tests"]]


@pytest.mark.slow
def test_models_give_the_same_tokens_in_every_way_and_on_two_ranks(tmp_path: Path) -> None:
    """On a CPU nothing is recorded, so two ways of one model with experts are enough."""
    found = two_ranks(TINY, tmp_path, "cpu")
    assert found["ok"] and len(found["checks"]) == 6, found
    checks = list(islice(_model_checks(TINY, tmp_path, CpuPlatform()), 2))
    assert all(check.ok for check in checks), checks


def test_without_a_gpu_the_suite_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_suite.main(["--output", str(tmp_path)]) == 2
    assert "finds no NVIDIA GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_correctness_tells_what_it_has_when_its_time_is_up(tmp_path: Path) -> None:
    """Rather than to be ended, with nothing told."""
    found = correctness(replace(TINY, until=time.monotonic() + 1.0), tmp_path, "cpu")
    done, rest = found["checks"]
    assert (
        done["ok"] and not rest["ok"] and rest["detail"] == "no time was left" and not found["ok"]
    )


def test_calls_are_warm_before_they_are_timed() -> None:
    """However short one is: a processor at rest takes its time to reach its clock rate."""
    calls: list[float] = []
    milliseconds(
        lambda: calls.append(time.perf_counter()), CpuPlatform(), replace(TINY, warm_up=0.05)
    )
    assert len(calls) > 3 + TINY.repeats and calls[-TINY.repeats] - calls[0] >= 0.05


def _varlen_of_2_11(
    q: Any,
    k: Any,
    v: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    window_size: Any = (-1, -1),
) -> Any:
    return k.shape[1]


def _varlen_of_2_13(
    q: Any,
    k: Any,
    v: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    window_size: Any = (-1, -1),
    enable_gqa: bool = False,
) -> Any:
    assert enable_gqa, "heads that share keys have to be announced"
    return k.shape[1]


@pytest.mark.parametrize("varlen_attn", [_varlen_of_2_11, _varlen_of_2_13])
def test_attention_of_ragged_batches_is_called_as_each_torch_has_it(
    varlen_attn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=varlen_attn)
    )
    platform = CpuPlatform()
    metadata, num_pages = made_up_step([(5, 0), (3, 0)], platform, np.random.default_rng(0))
    layout = KVLayout.of_heads(4, 2, 16, torch.float32)
    tensors = gpu_attention._tensors(layout, 8, num_pages, platform)
    assert gpu_attention._work("torch varlen", tensors, layout, metadata, platform)() == 2


def test_what_a_part_warned_of_stands_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures may be another mode's than its name says."""
    about = dict.fromkeys(
        ("device", "date", "scale", "python", "torch", "cuda", "triton", "piecework"), "x"
    )
    page = markdown(
        {
            "about": about,
            "parts": {
                "load_vllm": {
                    "ok": True,
                    "seconds": 1.0,
                    "left_out": "x",
                    "warnings": ["WARNING a: b"],
                }
            },
        }
    )
    assert "## Warnings\n\n- load_vllm: WARNING a: b" in page
    text = """
import logging, sys
__version__ = "1"
for _ in range(2):
    sys.stderr.write("\\rcompiling: 50%|=====     |")
    logging.getLogger("vllm").warning("no kernel for this")
class LLM: ...
"""
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(stand_in(tmp_path, text)), os.environ.get("PYTHONPATH", "")]),
    )
    _, report, _ = suite(tmp_path / "out", "--parts", "load_vllm")
    assert report["parts"]["load_vllm"]["warnings"] == ["WARNING vllm: no kernel for this"]


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_suite.main(["--parts", "floors,speed"]) == 2
    assert "there is no speed; choose from floors" in capsys.readouterr().err
