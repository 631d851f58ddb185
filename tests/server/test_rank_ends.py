"""Ranks that are killed or stopped: the engine starts again, says which rank it was, loses no
request, and leaves no process and no memory behind.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from image_stand_in import data_url
from server_process import ServerProcess, ready
from tiny_models import make_tiny_model
from tiny_vision import make_slow_vision, picture_file

# A tiny model repeats itself, and its guesses would end requests before a rank is ended.
FLAGS = ("--tp-size", "2", "--log-level", "error", "--speculative-algorithm", "none")
# For a rank that is stopped. Ranks of a busy machine need more than that to start together.
SHORT = ("--dist-timeout", "2")
LENGTH = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2))


@pytest.fixture
def server(model: str) -> Iterator[ServerProcess]:
    with ready(model, *FLAGS) as server:
        yield server


def ranks(server: ServerProcess, within: float = 30.0) -> list[psutil.Process]:
    """The processes of rank 0 and rank 1, once both are there."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        for engine in psutil.Process(server.process.pid).children():
            found = [
                each for each in engine.children() if "rank_process" in "".join(each.cmdline())
            ]
            if found:
                return [engine, *found]
        time.sleep(0.05)
    raise AssertionError("the ranks are not there")


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {file.name for file in folder.iterdir()} if folder.is_dir() else set()


def complete(server: ServerProcess, prompt: list[int]) -> str:
    body = {"prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


PROMPTS = [[1 + (7 * i + j) % 300 for j in range(5 + 3 * i)] for i in range(2)]


def running(server: ServerProcess) -> int:
    (stats,) = httpx.get(f"{server.url}/server_info").json()["internal_states"]
    count: int = stats["running_requests"]
    return count


def load(server: ServerProcess, pool: ThreadPoolExecutor) -> list[Future[str]]:
    """Requests under way."""
    futures = [pool.submit(complete, server, prompt) for prompt in PROMPTS]
    end = time.monotonic() + 30
    while running(server) < len(PROMPTS):
        assert time.monotonic() < end, "the requests do not run"
        time.sleep(0.01)
    return futures


def interrupt(
    server: ServerProcess, rank: int, number: signal.Signals, expected: list[str]
) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        futures = load(server, pool)
        before = ranks(server)
        before[rank].send_signal(number)
        assert [future.result() for future in futures] == expected
    assert not psutil.wait_procs(before, timeout=20)[1], "a rank of the life before is still there"
    server.wait_ready()


def test_nothing_is_lost_with_a_rank_and_nothing_left_by_a_server_that_is_killed(
    server: ServerProcess,
) -> None:
    expected = [complete(server, prompt) for prompt in PROMPTS]
    interrupt(server, 1, signal.SIGKILL, expected)
    before, processes = shared_memory(), ranks(server)
    # They are stopped, so that they cannot find out by themselves.
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    os.kill(server.process.pid, signal.SIGKILL)
    assert not psutil.wait_procs(processes, timeout=20)[1]
    assert shared_memory() <= before
    _, _, said = server.finish()
    assert said.count("rank 1 was ended by SIGKILL, and the engine with it") == 1


def describe(server: ServerProcess, seed: int) -> list[float]:
    """The log-probabilities of a text about an image that takes the encoder a while."""
    image = {"type": "image_url", "image_url": {"url": data_url(picture_file(240, 240, seed))}}
    body = {
        "messages": [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}],
        **{"max_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": True},
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["choices"][0]["logprobs"]["content"]
    return [token["logprob"] for token in tokens]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_while_an_image_is_encoded_loses_no_request(
    tmp_path: Path, rank: int
) -> None:
    with ready(str(make_slow_vision(tmp_path)), *FLAGS) as server, ThreadPoolExecutor(2) as pool:
        expected, other = complete(server, PROMPTS[0]), describe(server, 0)
        assert httpx.post(f"{server.url}/flush_cache").status_code == 200
        (before,) = httpx.get(f"{server.url}/server_info").json()["internal_states"]
        futures = [pool.submit(describe, server, 1), pool.submit(complete, server, PROMPTS[0])]
        end = time.monotonic() + 30
        while True:
            (stats,) = httpx.get(f"{server.url}/server_info").json()["internal_states"]
            if stats["encoder_seconds_total"] > before["encoder_seconds_total"]:
                break
            assert time.monotonic() < end, "nothing is encoded"
        assert stats["encoded_images_total"] == 1
        ranks(server)[rank].kill()
        described, text = (future.result() for future in futures)
        assert text == expected
        assert described == pytest.approx(describe(server, 1), abs=1e-4)
        assert described != pytest.approx(other, abs=1e-3)
        server.process.terminate()
        _, _, said = server.finish()
        assert said.count("restarting it") == 1


@pytest.mark.slow
def test_a_rank_0_that_is_stopped_is_found_in_a_step_and_between_two(model: str) -> None:
    with ready(model, *FLAGS, *SHORT) as server:
        expected = [complete(server, prompt) for prompt in PROMPTS]
        for _ in range(2):
            interrupt(server, 0, signal.SIGSTOP, expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_that_end_again_and_again_lose_nothing(model: str) -> None:
    """Nine times by SIGKILL, and once stopped. An engine that ends three times within a minute is
    given up, so each of five servers loses two.
    """
    for life in range(5):
        with ready(model, *FLAGS, *SHORT) as server:
            expected = [complete(server, prompt) for prompt in PROMPTS]
            interrupt(server, 1, signal.SIGKILL, expected)
            last = (0, signal.SIGKILL) if life else (1, signal.SIGSTOP)
            interrupt(server, *last, expected)
            server.process.terminate()
            code, _, said = server.finish()
        assert code == 0 and said.count("restarting it") == 2
        assert said.count("rank 1 was ended by SIGKILL, and the engine with it") == 1
        late = "rank 1 did not come within 2 s (--dist-timeout)"
        assert (late in said) == (life == 0)
