"""Images that end their engine, or that it has no memory for: the others are made."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import httpx
import pytest
from diffusion_pipelines import Folder
from http_fixtures import client_of, error_of

from piecework.runtime.diffusion.config import DiffusionConfig
from piecework.server.config.images import ImageServerConfig
from piecework.server.engine import quarantine
from piecework.server.image_service import create_image_app
from piecework.server.images.client import ImageClient

PATH = "/v1/images/generations"
POISON, HOG, TOO_WIDE = 666, 667, 96


FAULTY_ENGINE = f"""
import os, signal, sys
import torch
from piecework.runtime.engine import process
from piecework.runtime.diffusion import engine
from piecework.runtime.diffusion.flux import Flux

plain_predict = Flux.predict

def predict(self, states):
    if any(state.params.seed == {POISON} for state in states):
        os._exit(7)
    if any(state.params.seed == {HOG} for state in states):
        os.kill(os.getpid(), signal.SIGKILL)
    if any(state.params.width == {TOO_WIDE} for state in states):
        raise torch.OutOfMemoryError("out of memory")
    return plain_predict(self, states)

Flux.predict = predict
sys.exit(process.run_engine(lambda: engine))
"""


@pytest.fixture
async def faulty(
    pipeline_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """The application over an engine that ends at one seed, and has no memory for one width."""
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY_ENGINE)
    config = ImageServerConfig(
        engine=DiffusionConfig(model_path=str(pipeline_folder("flux")), num_threads=1)
    )
    engine = ImageClient(config.engine, log_level="error", command=(sys.executable, str(script)))
    await engine.start()
    try:
        assert await engine.wait_ready(), engine.failure
        async with client_of(create_image_app(engine, config)) as client:
            yield client
    finally:
        await engine.stop()


@pytest.mark.slow
async def test_memory_that_does_not_suffice_is_told_and_the_server_goes_on(
    faulty: httpx.AsyncClient,
) -> None:
    body = {"prompt": "a fox", "num_inference_steps": 1}
    large, small = await asyncio.gather(
        *(faulty.post(PATH, json={**body, "size": size}) for size in (f"{TOO_WIDE}x32", "32x32"))
    )
    error = error_of(large, 400, "size")
    assert error["code"] == "out_of_memory" and "ask for a smaller width" in error["message"]
    assert small.status_code == 200


@pytest.mark.slow
async def test_an_image_that_ends_the_engine_is_found_and_the_others_are_made(
    faulty: httpx.AsyncClient,
) -> None:
    body = {"prompt": "a fox", "size": "32x32", "num_inference_steps": 1}
    answers = await asyncio.gather(
        *(faulty.post(PATH, json={**body, "seed": seed}) for seed in (1, POISON, 2))
    )
    assert [answer.status_code for answer in answers] == [200, 500, 200]
    assert "ended twice" in error_of(answers[1], 500)["message"]


@pytest.mark.slow
async def test_an_image_for_which_the_engine_is_killed_is_not_made_for_ever(
    faulty: httpx.AsyncClient,
) -> None:
    """Once from outside may be chance; a third time there is none."""
    body = {"prompt": "a fox", "size": "32x32", "num_inference_steps": 1}
    answer = await faulty.post(PATH, json={**body, "seed": HOG})
    assert "was killed again" in error_of(answer, 500)["message"]


@pytest.mark.slow
async def test_an_image_that_ends_it_for_want_of_memory_is_found_at_once(
    faulty: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as it is asked for: what a request does is no fault of the engine's, which is
    started again each time.
    """
    monkeypatch.setattr(quarantine, "count_oom_kills", count().__next__)
    body = {"prompt": "a fox", "size": "32x32", "num_inference_steps": 1}
    for _ in range(2):
        assert (
            "memory was short"
            in error_of(await faulty.post(PATH, json={**body, "seed": HOG}), 500)["message"]
        )
    assert (await faulty.post(PATH, json=body)).status_code == 200
