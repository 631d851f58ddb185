"""The serving benchmark: what it sends, when, and the arithmetic of what it tells."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
import time
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scripted_server import VOCAB_SIZE, ScriptedServer

from piecework.bench.adapters import choose_adapters
from piecework.bench.apis import Answer
from piecework.bench.load import poisson_arrivals, run_load
from piecework.bench.report import Failures, Report, distribution
from piecework.bench.serving import ServingResult, ServingSettings, run
from piecework.bench.target import Api, Target
from piecework.bench.workloads import WORDS, Workload, make_prompts

SHORT = Workload(random_input_len=8, random_output_len=4)


def measure(
    server: ScriptedServer,
    tmp_path: Path,
    settings: ServingSettings,
    workload: Workload = SHORT,
    **target: Any,
) -> dict[str, Any]:
    """Run a load; what it wrote as JSON, and its exit code as `code`."""
    code = run(
        Target(base_url=server.url, **target),
        settings,
        workload,
        Report(str(tmp_path / "out.json")),
    )
    written: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return {**written, "code": code}


# Arithmetic


def percentile(values: list[float], percent: float) -> float:
    """By definition: the value at rank p (n - 1) of the sorted ones, interpolated between its
    neighbours.
    """
    ordered = sorted(values)
    rank = percent / 100 * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_distributions(values: list[float]) -> None:
    told = distribution(values)
    assert told is not None
    expected = {
        "median": percentile(values, 50),
        "p90": percentile(values, 90),
        "p99": percentile(values, 99),
    }
    assert told == pytest.approx({"mean": math.fsum(values) / len(values), **expected})


def test_no_values_have_no_distribution() -> None:
    assert distribution([]) is None


def answer(
    sent: float, token_times: list[float], tokens: int | None, prompt_tokens: int = 10
) -> Answer:
    last = token_times[-1] if token_times else sent
    return Answer(
        sent=sent,
        token_times=token_times,
        ended=last + 0.5,
        prompt_tokens=prompt_tokens,
        completion_tokens=tokens,
    )


def test_latencies_by_hand() -> None:
    """Four tokens in three events, one token, none."""
    result = ServingResult(duration=4.0, failures=Failures())
    for each in (answer(1.0, [2.0, 2.5, 3.5], 4), answer(2.0, [2.25], 1), answer(3.0, [], 0)):
        result.add(each)
    assert result.ttft == [1.0, 0.25]
    assert result.tpot == [0.5]
    assert result.itl == [0.5, 1.0]
    assert result.e2e == [3.0, 0.75, 0.5]
    told = result.as_dict()
    assert (told["completed"], told["prompt_tokens"], told["output_tokens"]) == (3, 30, 5)
    assert (told["request_throughput"], told["output_throughput"], told["total_throughput"]) == (
        0.75,
        1.25,
        8.75,
    )
    assert told["mean_concurrency"] == 4.25 / 4
    assert told["ttft_ms"] == pytest.approx(
        {"mean": 625.0, "median": 625.0, "p90": 925.0, "p99": 992.5}
    )


def test_without_usage_events_stand_for_tokens() -> None:
    result = ServingResult(duration=1.0, failures=Failures())
    result.add(answer(0.0, [0.1, 0.2, 0.3], None))
    assert (result.output_tokens, result.without_usage) == (3, 1)
    assert any("without usage" in line for line in result.lines())


# The load


def test_a_measured_load(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.delay = 0.05
    told = measure(
        server, tmp_path, ServingSettings(num_prompts=12, max_concurrency=3, num_warmups=2)
    )
    assert (told["code"], told["completed"], told["failed"]) == (0, 12, 0)
    assert len(server.requests) == 14 and server.most_running == 3
    assert (told["prompt_tokens"], told["output_tokens"]) == (12 * 8, 12 * 4)
    assert told["duration"] >= 12 / 3 * 0.2 * 0.95
    assert told["ttft_ms"]["median"] >= 47 and told["e2e_ms"]["median"] >= 190
    assert told["model"] == "scripted" and told["request_rate"] == "inf"
    out = capsys.readouterr().out
    assert "12 answered, 0 failed" in out
    for name in ("TTFT", "TPOT", "ITL", "E2E"):
        assert f"\n{name} " in out


def test_accepted_proposals_of_the_load_are_counted(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ServingSettings(num_prompts=5, num_warmups=2)
    assert measure(server, tmp_path, settings)["proposals"] is None
    assert "Speculation" not in capsys.readouterr().out
    server.accepts_proposals = True
    assert measure(server, tmp_path, settings)["proposals"] == {"proposed": 20, "accepted": 15}
    assert "15 of 20 proposed tokens accepted (75%)" in capsys.readouterr().out


@pytest.mark.parametrize("api", list(Api))
def test_every_api_can_be_loaded(server: ScriptedServer, tmp_path: Path, api: Api) -> None:
    workload = Workload(kind="words", random_input_len=5, random_output_len=3)
    told = measure(
        server, tmp_path, ServingSettings(num_prompts=4, ignore_eos=True), workload, api=api
    )
    assert (told["prompt_tokens"], told["output_tokens"], told["tpot_ms"] is None) == (
        20,
        12,
        False,
    )
    for _, body in server.requests:
        assert (body.get("sampling_params") or body)["ignore_eos"] is True and body[
            "stream"
        ] is True


def test_images_are_sent_new_and_again_and_with_a_share_of_the_load(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = Workload(kind="words", random_input_len=3, random_output_len=3, images=2,
                        image_size=20, image_share=0.5)  # fmt: skip
    told = measure(server, tmp_path, ServingSettings(num_prompts=6), workload, api=Api.CHAT)
    contents = [body["messages"][0]["content"] for _, body in server.requests]
    warm_up, alone, load = contents[:1], contents[1:11], contents[11:]
    assert all(isinstance(content, str) for content in warm_up)
    assert alone[::2] == alone[1::2] and len({json.dumps(content) for content in alone}) == 5
    kinds = [[part["type"] for part in one] for one in load if isinstance(one, list)]
    assert kinds == [["image_url", "image_url", "text"]] * 3
    assert told["first_image_ms"]["median"] > 0 and told["same_image_ms"]["median"] > 0
    assert "for a new image" in capsys.readouterr().out
    url = alone[0][0]["image_url"]["url"]
    with Image.open(BytesIO(base64.b64decode(url.partition(",")[2]))) as picture:
        assert picture.size == (20, 20) and picture.mode == "RGB"
        picture.load()


def test_requests_name_adapters_in_turn(server: ScriptedServer, tmp_path: Path) -> None:
    settings = ServingSettings(num_prompts=4, max_concurrency=1, lora=("sql", "chat", "own"))
    for api, member in ((Api.COMPLETION, "model"), (Api.GENERATE, "lora_path")):
        server.requests.clear()
        measure(server, tmp_path, settings, api=api)
        told = [body[member] for _, body in server.requests]
        assert told == ["sql", "chat", "own", "sql", "chat"]  # The first one warms up.


def test_adapters_are_drawn_by_zipfs_law_from_the_seed() -> None:
    names = [f"a{place}" for place in range(8)]
    drawn = choose_adapters(names, 20_000, 1.0, seed=3)
    assert drawn == choose_adapters(names, 20_000, 1.0, seed=3)
    assert drawn != choose_adapters(names, 20_000, 1.0, seed=4)
    most = drawn.count("a0")
    for place, name in enumerate(names):
        assert drawn.count(name) == pytest.approx(most / (place + 1), rel=0.1)


def test_zipfs_law_needs_adapters(server: ScriptedServer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--lora-zipf needs --lora"):
        measure(server, tmp_path, ServingSettings(lora_zipf=1.0))


def test_whole_answers_have_no_time_to_first_token(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = measure(server, tmp_path, ServingSettings(num_prompts=3, stream=False))
    assert told["ttft_ms"] is None and told["e2e_ms"] is not None
    assert "TTFT               -" in capsys.readouterr().out
    assert not any(body.get("stream") for _, body in server.requests)


def test_failed_requests_are_counted(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fail = lambda number: 429 if number in (2, 4) else None
    told = measure(server, tmp_path, ServingSettings(num_prompts=6, num_warmups=0))
    assert (told["code"], told["completed"], told["failed"], told["failures"]) == (
        1,
        4,
        2,
        {"HTTP 429": 2},
    )
    assert told["output_tokens"] == 16
    assert "2 x HTTP 429: scripted 429" in capsys.readouterr().out


def test_a_first_request_that_fails_ends_it(server: ScriptedServer, tmp_path: Path) -> None:
    server.fail = lambda number: 400
    with pytest.raises(ValueError, match=r"the first request .* failed: HTTP 400: scripted 400"):
        measure(server, tmp_path, ServingSettings(num_prompts=6))


def test_arrivals_are_those_of_the_rate(server: ScriptedServer, tmp_path: Path) -> None:
    told = measure(server, tmp_path, ServingSettings(num_prompts=20, request_rate=50.0, seed=3))
    rng = random.Random(3)
    make_prompts(Workload(random_input_len=8, random_output_len=4, vocab_size=VOCAB_SIZE), 21, rng)
    arrivals = poisson_arrivals(20, 50.0, rng)
    assert arrivals is not None and told["duration"] >= arrivals[-1]


def test_poisson_arrivals_have_the_mean_and_spread_of_their_rate() -> None:
    times = poisson_arrivals(20_000, 4.0, random.Random(0))
    assert times is not None
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0.0 and mean == pytest.approx(0.25, rel=0.03)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(
        0.25, rel=0.05
    )
    assert poisson_arrivals(5, float("inf"), random.Random(0)) is None


def test_nothing_is_sent_before_its_time_and_results_keep_their_order() -> None:
    arrivals = [0.0, 0.02, 0.02, 0.05]

    async def send(item: int) -> tuple[int, float]:
        return item, time.perf_counter()

    begin = time.perf_counter()
    results = asyncio.run(run_load([7, 8, 9, 10], send, arrivals=arrivals, concurrency=2))
    assert [item for item, _ in results] == [7, 8, 9, 10]
    assert all(sent - begin >= due for (_, sent), due in zip(results, arrivals, strict=True))


# Prompts


@given(
    length=st.integers(1, 300),
    ratio=st.floats(0, 1),
    prefix=st.integers(1, 50),
    prefixes=st.integers(1, 3),
    kind=st.sampled_from(["token-ids", "words"]),
)
def test_random_prompts_are_as_long_as_asked_for(
    length: int, ratio: float, prefix: int, prefixes: int, kind: str
) -> None:
    workload = Workload(
        dataset="shared-prefix",
        kind=kind,
        random_input_len=length,
        random_output_len=length,
        random_range_ratio=ratio,
        prefix_len=prefix,
        num_prefixes=prefixes,
        vocab_size=VOCAB_SIZE,
    )
    prompts = [
        prompt._replace(content=_pieces(prompt.content))
        for prompt in make_prompts(workload, 12, random.Random(1))
    ]
    for index, prompt in enumerate(prompts):
        for drawn in (len(prompt.content) - prefix, prompt.max_tokens):
            assert max(1, int(length * (1 - ratio))) <= drawn <= max(1, int(length * (1 + ratio)))
        assert prompt.content[:prefix] == prompts[index % prefixes].content[:prefix]
        assert set(prompt.content) <= set(WORDS) | set(range(VOCAB_SIZE))


def _pieces(content: Any) -> Any:
    return content.split() if isinstance(content, str) else content


def test_a_seed_gives_the_same_prompts_again_and_another_seed_others() -> None:
    workload = Workload(random_input_len=50, random_range_ratio=0.5, vocab_size=VOCAB_SIZE)
    first, again, other = (make_prompts(workload, 5, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert len({tuple(prompt.content) for prompt in first}) == 5


def test_token_ids_stay_below_what_the_server_tells(server: ScriptedServer, tmp_path: Path) -> None:
    measure(
        server,
        tmp_path,
        ServingSettings(num_prompts=20),
        Workload(random_input_len=100, random_output_len=1),
    )
    ids = {token for _, body in server.requests for token in body["prompt"]}
    assert min(ids) >= 0 and VOCAB_SIZE // 2 < max(ids) < VOCAB_SIZE


def test_without_a_known_vocabulary_it_says_what_to_do(
    server: ScriptedServer, tmp_path: Path
) -> None:
    server.missing = {"/get_model_info"}
    with pytest.raises(ValueError, match=r"--vocab-size.*--prompt-kind words"):
        measure(server, tmp_path, ServingSettings(num_prompts=1))
    told = measure(
        server,
        tmp_path,
        ServingSettings(num_prompts=1),
        Workload(random_input_len=5, random_output_len=1, vocab_size=50),
    )
    assert told["completed"] == 1


def test_gsm8k_prompts(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(
        '{"question": "Q1", "answer": "#### 1"}\n{"question": "Q2", "answer": "#### 2"}\n'
    )
    prompts = make_prompts(
        Workload(dataset="gsm8k", data_path=str(path), num_shots=1, output_len=99),
        3,
        random.Random(0),
    )
    assert prompts[1].content == "Question: Q1\nAnswer: #### 1\n\nQuestion: Q2\nAnswer:"
    assert (
        prompts[2] == prompts[0] and prompts[0].max_tokens == 99 and "Question" in prompts[0].stop
    )


def test_sharegpt_prompts(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    turns = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "x" * 40}]
    path.write_text(
        json.dumps([{"id": "1", "conversations": turns}, {"id": "2", "conversations": turns[:1]}])
    )
    workload = Workload(dataset="sharegpt-file", data_path=str(path))
    assert make_prompts(workload, 2, random.Random(0)) == [("Hello?", 10, (), ())] * 2


@pytest.mark.parametrize(
    "content", ["nonsense", '{"a": 1}', "[1]", '[{"conversations": [{}, {}]}]', "[]"]
)
def test_a_sharegpt_file_that_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "share.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"share\.json"):
        make_prompts(Workload(dataset="sharegpt-file", data_path=str(path)), 1, random.Random(0))


def test_sharegpt_needs_a_file() -> None:
    with pytest.raises(ValueError, match="--data-path"):
        make_prompts(Workload(dataset="sharegpt-file"), 1, random.Random(0))
