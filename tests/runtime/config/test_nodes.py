"""Two machines, which are two processes on the loopback here: the second holds its rank, and
neither waits for ever for the other.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from server_process import free_port, serve
from tiny_models import make_tiny_model

from piecework.kernels.collectives import TENSOR_PARALLEL, TorchGroup, get_group
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.config.nodes import check_nodes
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(1, 60))]
SETTINGS = {"dtype": "float32", "max_total_tokens": 2048, "num_threads": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2))


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PIECEWORK_DIST_KEY", "0123456789abcdef0123456789abcdef")
    return f"127.0.0.1:{free_port()}"


@contextlib.contextmanager
def second_node(model: str, address: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "piecework", "serve", model, "--tp-size", "2", "--nnodes", "2"]
    node = subprocess.Popen(
        [*command, "--node-rank", "1", "--dist-init-addr", address, *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield node
    finally:
        node.kill()
        node.communicate()


def said(node: subprocess.Popen[str], seconds: float = 30.0) -> tuple[int, str]:
    """Its exit code and its last line."""
    _, text = node.communicate(timeout=seconds)
    return node.returncode, text.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_second_node_holds_its_rank_and_ends_with_the_first(
    model: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo, as two machines do: there is no memory to share."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    alone = LLM(model, **SETTINGS)
    expected = [each.token_ids for each in alone.generate(PROMPTS, GREEDY)]
    with second_node(model, address) as node:
        llm = LLM(model, tp_size=2, nnodes=2, dist_init_addr=address, **SETTINGS)
        assert [each.token_ids for each in llm.generate(PROMPTS, GREEDY)] == expected
        assert isinstance(get_group(TENSOR_PARALLEL), TorchGroup) and node.poll() is None
        del llm
        gc.collect()
        code, line = said(node)
        assert code == 0 and "node 0's server has ended" in line


@pytest.mark.slow
def test_another_model_is_the_same_line_on_both_nodes(
    model: str, address: str, tmp_path: Path
) -> None:
    other = str(make_tiny_model(tmp_path, "llama", num_hidden_layers=1))
    with second_node(other, address) as node:
        with pytest.raises(ValueError, match="node 1 has another model than node 0") as error:
            LLM(model, tp_size=2, nnodes=2, dist_init_addr=address, **SETTINGS)
        assert said(node) == (2, f"piecework serve: error: {error.value}")


@pytest.mark.slow
def test_a_node_that_is_alone_says_who_is_missing_and_ends(model: str, address: str) -> None:
    flags = ("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", address, "--dist-timeout", "2")
    with second_node(model, f"127.0.0.1:{free_port()}", "--dist-timeout", "2") as node:
        with serve(model, *flags) as server:
            code, _, text = server.finish()
            assert code == 2
            assert "node 1 (rank 1) did not join at 127.0.0.1" in text.strip().splitlines()[-1]
        code, line = said(node)
        assert code == 2 and "node 0 was not there within 2 s (--dist-timeout)" in line


@pytest.mark.slow
def test_a_node_joins_again_whichever_side_was_killed(model: str, address: str) -> None:
    flags = ("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", address)
    body = {"prompt": [5, 6, 7], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    with second_node(model, address) as node, serve(model, *flags) as server:
        server.wait_ready()
        expected = server.client.post("/v1/completions", json=body).json()["choices"]
        for find in (lambda: rank_of(node), server.engine):
            find().kill()
            assert server.client.post("/v1/completions", json=body).json()["choices"] == expected
        server.process.terminate()
        assert server.finish()[0] == 0
        assert said(node)[0] == 0


def rank_of(node: subprocess.Popen[str]) -> psutil.Process:
    (rank,) = psutil.Process(node.pid).children()
    return rank


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ((2, 2, 2, "a:1"), "--node-rank must lie between 0 and 1"),
        ((2, 1, 1, None), "--node-rank must lie between 0 and 0"),
        ((3, 2, 0, "a:1"), "--tp-size 3 cannot be spread evenly over --nnodes 2"),
        ((2, 2, 0, None), "--nnodes takes --dist-init-addr HOST:PORT"),
        ((2, 2, 0, "a"), "--dist-init-addr a: this is no HOST:PORT"),
    ],
)
def test_settings_that_do_not_fit_together_are_one_line(
    settings: tuple[int, int, int, str | None], line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        check_nodes(*settings)


def test_groups_of_experts_divide_the_ranks() -> None:
    with pytest.raises(ValueError, match="--ep-size 3 must divide --tp-size 2"):
        EngineConfig(tp_size=2, ep_size=3)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_time_limit_that_is_none_is_one_line(seconds: float) -> None:
    with pytest.raises(ValueError, match="--dist-timeout must be at least 1 second"):
        EngineConfig(dist_timeout=seconds)
