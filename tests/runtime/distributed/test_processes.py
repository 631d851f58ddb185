"""`LLM(tp_size=2)`: ranks that are processes, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_models import make_tiny_model

from piecework.kernels.collectives import TENSOR_PARALLEL, TorchGroup, get_group
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.distributed import processes
from piecework.runtime.llm import LLM


def rank_processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [each for each in children if any("rank_process" in word for word in each.cmdline())]


def test_an_llm_of_two_ranks_answers_as_one_process_does_and_ends_them(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, num_hidden_layers=2)
    settings: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 512, "num_threads": 1}
    params = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9, 10, 11] * 8]
    expected = [each.token_ids for each in LLM(str(path), **settings).generate(prompts, params)]
    llm = LLM(str(path), tensor_parallel_size=2, **settings)
    started = rank_processes()
    assert len(started) == 1
    assert [each.token_ids for each in llm.generate(prompts, params)] == expected
    with pytest.raises(ValueError, match="one engine of several ranks at a time"):
        LLM(str(path), tp_size=2, **settings)
    del llm
    assert not psutil.wait_procs(started, timeout=10)[1]


def test_more_ranks_than_heads_are_refused_before_any_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a .gguf file says how many there are behind its lists."""
    monkeypatch.setattr(processes, "start_processes", None)
    path = make_tiny_model(tmp_path)
    with pytest.raises(ValueError, match="--tp-size 8 is more than the 4 heads of"):
        LLM(str(path), tp_size=8)
    with pytest.raises(ValueError, match="--tp-size 1000000 is more than the 9 heads of"):
        LLM("smollm2-135m", tp_size=1_000_000)


def test_what_a_rank_cannot_hold_is_one_line(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    with pytest.raises(ValueError, match="4 heads on 2 key/value heads cannot be split over 3"):
        LLM(str(path), tp_size=3, max_total_tokens=512, num_threads=1)


@pytest.mark.slow
def test_four_processes_over_gloo_answer_as_one_process_does_with_a_quantised_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights alone: of activations each rank would scale its own columns."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    path = make_tiny_model(tmp_path, num_hidden_layers=2, hidden_size=128, intermediate_size=256)
    settings: dict[str, Any] = {"quantization": "q8_0", "max_total_tokens": 512, "num_threads": 4}
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, logprobs=0)
    (alone,) = LLM(str(path), **settings).generate([[5, 6, 7]], params)
    llm = LLM(str(path), tp_size=4, **settings)
    assert isinstance(get_group(TENSOR_PARALLEL), TorchGroup)
    assert "in 8 bits" in llm.info.quantization[0]
    (by_four,) = llm.generate([[5, 6, 7]], params)
    assert by_four.logprobs[0].logprob == pytest.approx(alone.logprobs[0].logprob, abs=0.05)
    assert by_four.token_ids[0] == alone.token_ids[0]


STARTS = {
    "rank": "from piecework.runtime.distributed.processes import Job, _Processes\n"
    "_Processes('slow', None).start(Job(settings={}, log_level='info', rank=1))\n",
    "engine": "from piecework.server.engine.spawn import LANGUAGE_MODEL, spawn\n"
    "process = spawn((*LANGUAGE_MODEL[:-1], 'slow'))\n",
}


@pytest.mark.skipif(sys.platform != "linux", reason="who is stopped ends by prctl")
@pytest.mark.parametrize("what", STARTS)
def test_a_process_that_is_stopped_while_it_imports_ends_with_its_parent(
    what: str, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('new').write_text(str(os.getpid()))\n"
        "os.rename('new', 'pid')\n"
        "time.sleep(60)\n"
    )
    leader = subprocess.Popen(
        [sys.executable, "-c", f"import time\n{STARTS[what]}time.sleep(60)\n"], cwd=tmp_path
    )
    try:
        deadline = time.monotonic() + 40
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        rank = psutil.Process(int((tmp_path / "pid").read_text()))
        os.kill(rank.pid, signal.SIGSTOP)
    finally:
        leader.kill()
        leader.wait()
    gone, left = psutil.wait_procs([rank], timeout=5)
    for each in left:
        each.kill()
    assert gone
