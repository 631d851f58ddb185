"""`/v1/classify`: shares of labels, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from declared import check_answer
from http_fixtures import error_of
from pooling_here import client_here, load
from tiny_encoders import make_tiny_embedder, make_tiny_encoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

PATH = "/v1/classify"
LABELS = {0: "contradiction", 1: "neutral", 2: "entailment"}
INPUTS = ["a dog sleeps", ["the quick fox", "never"], "brown"]


def expected(folder: Path, activation: Any) -> np.ndarray:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = []
    for each in INPUTS:
        texts = [each] if isinstance(each, str) else each
        given = tokenizer(*texts, return_tensors="pt")
        if model.config.model_type == "distilbert":
            del given["token_type_ids"]
        with torch.no_grad():
            found.append(activation(model(**given).logits[0]))
    return torch.stack(found).numpy()


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "deberta-v2"])
async def test_shares_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    labels = {"num_labels": 3, "id2label": LABELS}
    folder = make_tiny_encoder(tmp_path, model_type, classifier=True, **labels)
    client, _ = client_here(load(folder))
    answer = await client.post(PATH, json={"input": INPUTS, "model": "tiny"})
    wanted = expected(folder, lambda logits: logits.softmax(-1))
    data = answer.json()["data"]
    np.testing.assert_allclose([each["probs"] for each in data], wanted, atol=1e-5)
    assert [each["label"] for each in data] == [LABELS[int(row.argmax())] for row in wanted]
    check_answer((await client.get("/openapi.json")).json(), "POST", PATH, answer)
    for path, body in (
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        assert PATH in error_of(await client.post(path, json=body), 400)["message"]


async def test_a_text_may_have_several_labels_where_the_folder_says_so(tmp_path: Path) -> None:
    several = {"num_labels": 2, "problem_type": "multi_label_classification"}
    folder = make_tiny_encoder(tmp_path, "bert", classifier=True, **several)
    answer = await client_here(load(folder))[0].post("/classify", json={"input": INPUTS})
    data = answer.json()["data"]
    wanted = expected(folder, torch.sigmoid)
    np.testing.assert_allclose([each["probs"] for each in data], wanted, atol=1e-5)
    assert {each["label"] for each in data} <= {"LABEL_0", "LABEL_1"}


async def test_a_decoder_classifies_too(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    make_tiny_embedder(tmp_path, "qwen3", num_hidden_layers=2)
    config = Qwen3Config.from_pretrained(tmp_path, num_labels=4, pad_token_id=0)
    Qwen3ForSequenceClassification(config).save_pretrained(tmp_path)
    answer = await client_here(load(tmp_path))[0].post(PATH, json={"input": "a dog"})
    (found,) = answer.json()["data"]
    assert found["num_classes"] == 4 and sum(found["probs"]) == pytest.approx(1)


@pytest.mark.parametrize("value", [[], [["a"] * 3], [[]], [3], {"text": "a"}, [["a", 3]], None])
async def test_what_is_no_text_and_no_pair_is_refused(tmp_path: Path, value: Any) -> None:
    folder = make_tiny_encoder(tmp_path, "bert", classifier=True)
    client, _ = client_here(load(folder))
    error_of(await client.post(PATH, json={"input": value}), 400, "input")


async def test_an_embedder_knows_no_labels(tmp_path: Path) -> None:
    client, _ = client_here(load(make_tiny_encoder(tmp_path, "bert")))
    answer = await client.post(PATH, json={"input": "a"})
    assert "/v1/embeddings" in error_of(answer, 400)["message"]
