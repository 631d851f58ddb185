"""`piecework serve` of an embedder: the process, its client, and what it lives through."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
from http_fixtures import client_of, error_of
from server_process import IMAGE_FLAGS, ServerProcess
from tiny_encoders import make_tiny_encoder, write_modules

from piecework.runtime.pooling.config import PoolingConfig
from piecework.runtime.pooling.folder import read_folder
from piecework.runtime.pooling.model import PoolingModel, PoolInput
from piecework.runtime.tokenizer.tokenizer import load_tokenizer
from piecework.server.config.pooling import PoolingServerConfig
from piecework.server.pooling.client import PoolingClient
from piecework.server.pooling_service import create_pooling_app

POISON = 17
FAULTY_ENGINE = f"""
import os, sys
from piecework.runtime.engine import process
from piecework.runtime.pooling import engine
from piecework.runtime.pooling.model import PoolingModel

plain_run = PoolingModel.run

def run(self, inputs):
    if any({POISON} in each.token_ids for each in inputs):
        os._exit(7)
    return plain_run(self, inputs)

PoolingModel.run = run
sys.exit(process.run_engine(lambda: engine))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tiny_encoder(tmp_path_factory.mktemp("served"), "bert")
    write_modules(made, "pooling_mode_mean_tokens")
    return made


def test_the_openai_client_gets_its_vectors(folder: Path) -> None:
    from openai import OpenAI

    server = ServerProcess(str(folder), common=IMAGE_FLAGS)
    try:
        server.wait_ready()
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        answer = client.embeddings.create(model="tiny", input=["a dog", "the fox jumps"])
        ids = [[2, 5, 7, 3], [2, 4, 6, 9, 3]]
        model = PoolingModel(PoolingConfig(model_path=str(folder)))
        expected = model.run([PoolInput(np.array(each, np.int32), len(each)) for each in ids])
        found = [entry.embedding for entry in answer.data]
        np.testing.assert_allclose(found, expected, atol=1e-5)
        server.process.terminate()
        code, out, _ = server.finish()
        assert code == 0
        assert "embeddings" in out and "mean, normalised; 32 numbers" in out
    finally:
        server.process.kill()
        server.finish()


@pytest.mark.slow
async def test_a_text_that_ends_the_engine_is_found_and_the_others_are_answered(
    folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY_ENGINE)
    config = PoolingServerConfig(
        engine=PoolingConfig(model_path=str(folder), num_threads=1, chunked_prefill_size=4096)
    )
    command = (sys.executable, str(script))
    tokenizer = load_tokenizer(str(folder))
    engine = PoolingClient(config.engine, tokenizer, log_level="error", command=command)
    await engine.start()
    try:
        assert await engine.wait_ready(), engine.failure
        async with client_of(create_pooling_app(engine, config, read_folder(str(folder)))) as http:
            answers = await asyncio.gather(
                *(
                    http.post("/v1/embeddings", json={"input": [[5, 6, token]] * 40})
                    for token in (7, POISON, 8)
                )
            )
        assert [answer.status_code for answer in answers] == [200, 500, 200]
        assert "ended twice" in error_of(answers[1], 500)["message"]
    finally:
        await engine.stop()
