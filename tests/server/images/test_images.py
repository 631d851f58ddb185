"""The images API of a real server over a tiny FLUX pipeline, through the real `openai` client."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import imageio.v3 as imageio
import numpy as np
import pytest
from declared import check_answer
from diffusion_pipelines import Folder, load, pixels
from http_fixtures import error_of
from openai import AsyncOpenAI, OpenAI
from server_process import IMAGE_FLAGS, ServerProcess, ready, serve

KEY = "secret"
PATH = "/v1/images/generations"
SEED = 7
FAST = {"num_inference_steps": 2, "seed": SEED}
QUEUE = 24
POISON, HOG, TOO_WIDE = 666, 667, 96


@pytest.fixture(scope="module")
def server(pipeline_folder: Folder) -> Iterator[ServerProcess]:
    """One for all tests: what a test does to it, the next ones must not notice."""
    flags = ("--api-key", KEY, "--max-queued-requests", str(QUEUE))
    with ready(str(pipeline_folder("flux")), *flags, common=IMAGE_FLAGS) as server:
        server.client.headers["Authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture
async def async_client(server: ServerProcess) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.fixture(scope="module")
def alone(pipeline_folder: Folder) -> Any:
    """(prompt, width, height, steps, seed) to the image that the pipeline makes of it by itself:
    [H, W, 3] bytes.
    """
    model = load(pipeline_folder("flux"))

    @cache
    def image(prompt: str, width: int, height: int, steps: int, seed: int) -> np.ndarray:
        made = pixels(
            model, prompt=prompt, width=width, height=height, num_inference_steps=steps, seed=seed
        )
        return (made[0] * 255).round().astype(np.uint8)

    return image


def decoded(image: Any) -> np.ndarray:
    return imageio.imread(base64.b64decode(image.b64_json))


def assert_same(image: np.ndarray, expected: np.ndarray) -> None:
    """But for a rounding: neighbours in a batch may change the last digit of a float."""
    assert image.shape == expected.shape
    assert np.abs(image.astype(int) - expected.astype(int)).max() <= 1


def gauge(server: ServerProcess, name: str) -> float:
    (line,) = (
        line
        for line in server.client.get("/metrics").text.splitlines()
        if line.startswith(f"piecework:{name}{{")
    )
    return float(line.rpartition(" ")[2])


async def until_idle(server: ServerProcess) -> None:
    async with asyncio.timeout(30):
        while gauge(server, "num_running_reqs") or gauge(server, "num_queue_reqs"):
            await asyncio.sleep(0.05)


def test_images_are_those_of_the_pipeline_and_their_seeds_follow_each_other(
    client: OpenAI, alone: Any
) -> None:
    answer = client.images.generate(prompt="a fox", n=2, size="64x48", extra_body=FAST)
    assert answer.data is not None and answer.size == "64x48"  # type: ignore[comparison-overlap]
    for number, image in enumerate(answer.data):
        assert image.seed == SEED + number  # type: ignore[attr-defined]
        assert_same(decoded(image), alone("a fox", 64, 48, 2, SEED + number))
    assert answer.warnings == []  # type: ignore[attr-defined]


def test_a_seed_that_was_drawn_gives_the_image_again(client: OpenAI) -> None:
    first = client.images.generate(
        prompt="a fox", size="32x32", extra_body={"num_inference_steps": 1}
    ).data[0]  # type: ignore[index]
    second = client.images.generate(
        prompt="a fox", size="32x32", extra_body={"num_inference_steps": 1, "seed": first.seed}
    ).data[0]  # type: ignore
    assert first.b64_json == second.b64_json


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_a_url_is_fetched_without_a_key(client: OpenAI, alone: Any, kind: Any) -> None:
    answer = client.images.generate(
        prompt="a fox", size="64x48", response_format="url", output_format=kind, extra_body=FAST
    )
    url = answer.data[0].url or ""  # type: ignore[index]
    file = httpx.get(url)
    assert file.headers["content-type"] == f"image/{kind}" and url.endswith(f".{kind}")
    image = imageio.imread(io.BytesIO(file.content))
    if kind == "png":
        assert_same(image, alone("a fox", 64, 48, 2, SEED))
    else:
        assert image.shape == (48, 64, 3)
    error_of(httpx.get(f"{url}x"), 404)


@pytest.mark.parametrize("form", ["b64_json", "url"])
def test_answers_are_as_the_server_declares_them(server: ServerProcess, form: str) -> None:
    document = server.client.get("/openapi.json").json()
    made = server.client.post(
        PATH, json={"prompt": "a fox", "size": "32x32", "response_format": form, **FAST}
    )
    assert made.status_code == 200
    check_answer(document, "POST", PATH, made)
    if form == "url":
        check_answer(
            document,
            "GET",
            "/v1/images/files/{name}",
            server.client.get(made.json()["data"][0]["url"]),
        )
    check_answer(document, "POST", PATH, server.client.post(PATH, json={}))
    assert "422" not in str(document["paths"])


def test_what_is_ignored_or_cut_off_is_told(client: OpenAI) -> None:
    answer = client.images.generate(
        prompt="a fox " * 300, size="32x32", quality="hd", style="vivid", extra_body=FAST
    )
    told = " | ".join(answer.warnings)  # type: ignore[attr-defined]
    assert "quality was ignored" in told and "style was ignored" in told
    assert "text_encoder reads the first" in told and "cut off" in told


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"size": "64x50"}, "size", "choose 48 or 64"),
        ({"size": "huge"}, "size", "1024x768"),
        ({"size": "0x64"}, "size", "between 1 and 8192"),
        ({"size": "4096x2048"}, "size", "8,388,608 pixels, more than the 4,194,304"),
        ({"width": 8192, "height": 1024}, "width", "--max-image-pixels"),
        ({"width": 60}, "width", "choose 48 or 64"),
        ({"size": "64x64", "width": 64}, "size", "either"),
        ({"num_inference_steps": 0}, "num_inference_steps", "between 1 and 1000"),
        ({"num_inference_steps": 100_000}, "num_inference_steps", "between 1 and 1000"),
        ({"prompt": " "}, "prompt", "say what to draw"),
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": "x" * 200_000}, "prompt", "shorten it"),
        ({"n": 11}, "n", "10"),
        ({"n": 0}, "n", "1"),
        ({"guidance_scale": -1.0}, "guidance_scale", "between 0 and 100"),
        ({"guidance_scale_2": 1.0}, "guidance_scale_2", "leave it out"),
        ({"num_frames": 5}, "num_frames", "piecework generate"),
        ({"true_cfg_scale": 4.0}, "true_cfg_scale", "guidance_scale"),
        ({"response_format": "tiff"}, "response_format", "b64_json"),
        ({"output_format": "tiff"}, "output_format", "png"),
        ({"seed": "seven"}, "seed", "integer"),
        ({"stream": True}, "stream", "leave it out"),
    ],
)
def test_bad_input_names_the_parameter_and_the_remedy(
    server: ServerProcess, changes: dict[str, Any], param: str, says: str
) -> None:
    body = {
        "prompt": "a fox",
        "num_inference_steps": 1,
        **({} if "width" in changes else {"size": "64x64"}),
        **changes,
    }
    assert says in error_of(server.client.post(PATH, json=body), 400, param)["message"]


def test_the_rest_of_the_server_is_there(server: ServerProcess, client: OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == ["tiny"] and client.models.retrieve(
        "tiny"
    ).id == "tiny"
    assert (
        server.client.get("/ready").status_code == server.client.get("/version").status_code == 200
    )
    error_of(httpx.get(f"{server.url}/v1/models"), 401)
    error = error_of(server.client.post("/v1/chat/completions", json={}), 404)
    assert (
        "/v1/chat/completions" in error["message"]
        and "POST /v1/images/generations" in error["message"]
    )
    error_of(server.client.post(PATH, json={"prompt": "a fox", "model": "other"}), 404, "model")
    assert (
        server.client.get("/health", headers={"X-Request-Id": "mine"}).headers["x-request-id"]
        == "mine"
    )


async def test_twenty_at_once_with_cancels_lose_nothing(
    server: ServerProcess, async_client: AsyncOpenAI, alone: Any
) -> None:
    """Two shapes, different numbers of steps; every third client leaves at some moment."""

    async def ask(number: int) -> Any:
        shape, steps = ((48, 32), (32, 48))[number % 2], 2 + number % 3
        extra = {"num_inference_steps": steps, "seed": number}
        size: Any = f"{shape[0]}x{shape[1]}"
        answer = await async_client.images.generate(prompt="a fox", size=size, extra_body=extra)
        assert answer.data is not None
        return decoded(answer.data[0]), alone("a fox", *shape, steps, number)

    jobs = [asyncio.create_task(ask(number)) for number in range(20)]
    leaving = jobs[::3]
    for job in leaving:
        await asyncio.sleep(0.02)
        job.cancel()
    async with asyncio.timeout(120):
        results = await asyncio.gather(*jobs, return_exceptions=True)
    answered = [result for result in results if not isinstance(result, asyncio.CancelledError)]
    assert len(answered) >= len(jobs) - len(leaving)
    for image, expected in answered:
        assert_same(image, expected)
    await until_idle(server)
    assert gauge(server, "num_requests_total") >= gauge(server, "num_images_total")


async def test_a_client_that_leaves_ends_its_image_at_the_next_step(
    server: ServerProcess, async_client: AsyncOpenAI
) -> None:
    before = gauge(server, "num_steps_total")
    extra = {"num_inference_steps": 1000}
    job = asyncio.create_task(
        async_client.images.generate(prompt="a fox", size="256x256", extra_body=extra)
    )
    async with asyncio.timeout(30):
        while gauge(server, "num_steps_total") < before + 2:
            await asyncio.sleep(0.02)
    job.cancel()
    await until_idle(server)
    assert gauge(server, "num_steps_total") < before + 900
    assert gauge(server, "num_aborted_requests_total") > 0


async def test_more_than_may_wait_are_told_to_come_again(server: ServerProcess) -> None:
    body = {"prompt": "a fox", "n": 10, "size": "32x32", "num_inference_steps": 3}
    async with httpx.AsyncClient(
        base_url=server.url, headers=server.client.headers, timeout=60
    ) as client:
        answers = await asyncio.gather(*(client.post(PATH, json=body) for _ in range(4)))
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused and all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert all(
        len(answer.json()["data"]) == 10 for answer in answers if answer not in refused
    ) and len(refused) < len(answers)
    await until_idle(server)


@pytest.mark.slow
async def test_a_killed_engine_loses_no_image(
    server: ServerProcess, async_client: AsyncOpenAI, alone: Any
) -> None:
    async def ask(seed: int) -> np.ndarray:
        extra = {"num_inference_steps": 10, "seed": seed}
        answer = await async_client.images.generate(prompt="a fox", size="48x48", extra_body=extra)  # type: ignore[arg-type]
        assert answer.data is not None
        return decoded(answer.data[0])

    before = gauge(server, "num_steps_total")
    jobs = [asyncio.create_task(ask(seed)) for seed in range(5)]
    async with asyncio.timeout(30):
        while gauge(server, "num_steps_total") < before + 3:
            await asyncio.sleep(0.01)
    os.kill(server.engine().pid, signal.SIGKILL)
    async with asyncio.timeout(90):
        images = await asyncio.gather(*jobs)
    for seed, image in enumerate(images):
        assert_same(image, alone("a fox", 48, 48, 10, seed))


@pytest.mark.slow
def test_a_folder_that_lacks_a_part_is_one_line_and_exit_code_2(
    pipeline_folder: Folder, tmp_path: Path
) -> None:
    folder = tmp_path / "flux"
    shutil.copytree(pipeline_folder("flux"), folder)
    shutil.rmtree(folder / "transformer")
    with serve(str(folder), common=IMAGE_FLAGS) as server:
        code, _, printed = server.finish()
    assert code == 2 and printed.count("\n") == 1
    assert printed.startswith("piecework serve: error: ") and "lacks its transformer" in printed
