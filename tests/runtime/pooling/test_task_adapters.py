"""Jina v3 as it is published, with adapters of its tasks, and Jina Reranker v2."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from http_fixtures import error_of
from pooled_texts import inputs, run, states
from pooling_here import client_here, load
from safetensors.torch import load_file, save_file
from tiny_encoders import make_tiny_encoder, write_modules
from transformers import AutoModelForSequenceClassification

from piecework.runtime.pooling.model import PoolInput

TASKS = ["retrieval.query", "retrieval.passage", "separation"]
INSTRUCTIONS = {"retrieval.query": "red fox ", "retrieval.passage": "lazy ", "separation": ""}
RANK, ALPHA = 3, 2.0
CODE = {"AutoConfig": "some/repository--configuration_xlm_roberta.XLMRobertaFlashConfig"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The published folder, and for no task and for each one a folder with its weights alone."""
    base = make_tiny_encoder(tmp_path_factory.mktemp("base"), "jina_embeddings_v3")
    tensors = load_file(base / "model.safetensors")
    whole = make_tiny_encoder(tmp_path_factory.mktemp("published"), "jina_embeddings_v3")
    merged = [dict(tensors) for _ in TASKS]
    stored = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            stored[f"roberta.{name}"] = tensor
            continue
        out, size = tensor.shape
        is_table = "embeddings" in name
        shapes = ((out, RANK), (RANK, size)) if is_table else ((RANK, size), (out, RANK))
        first, second = (
            torch.randn(len(TASKS), *shape, generator=generator) / 3 for shape in shapes
        )
        own = f"roberta.{name.removesuffix('weight')}parametrizations.weight"
        stored |= {f"{own}.original": tensor, f"{own}.0.lora_A": first, f"{own}.0.lora_B": second}
        for each, a, b in zip(merged, first, second, strict=True):
            each[name] = tensor + (a @ b if is_table else b @ a) * ALPHA / RANK
    save_file(stored, whole / "model.safetensors")
    content = json.loads((whole / "config.json").read_text())
    del content["rope_parameters"]
    content |= {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "auto_map": CODE,
        "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0,
        "lora_adaptations": TASKS,
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "task_instructions": INSTRUCTIONS,
    }
    (whole / "config.json").write_text(json.dumps(content))
    write_modules(whole, "pooling_mode_mean_tokens", normalize=False)
    alone = []
    for each in merged:
        alone.append(make_tiny_encoder(tmp_path_factory.mktemp("task"), "jina_embeddings_v3"))
        save_file(each, alone[-1] / "model.safetensors", {"format": "pt"})
    return [whole, base, *alone]


def test_each_text_of_a_batch_gets_the_adapter_of_its_task(folders: list[Path]) -> None:
    whole, *alone = folders
    given = [
        PoolInput(each.token_ids, each.first, number % 4 - 1)
        for number, each in enumerate(inputs())
    ]
    expected = [states(alone[each.adapter + 1], [each])[0].mean(0) for each in given]
    np.testing.assert_allclose(run(whole, given), torch.stack(expected), atol=1e-5)


async def test_a_prompts_name_chooses_the_adapter(folders: list[Path]) -> None:
    client, _ = client_here(load(folders[0]))
    vectors = {}
    for name, number in (("retrieval.query", 1), ("retrieval.passage", 2)):
        body = {"input": "dog", "prompt_name": name}
        answer = await client.post("/v1/embeddings", json=body)
        vectors[name] = np.array(answer.json()["data"][0]["embedding"])
        text = {"input": INSTRUCTIONS[name] + "dog"}
        expected = await client_here(load(folders[number + 1]))[0].post("/v1/embeddings", json=text)
        found = expected.json()["data"][0]["embedding"]
        np.testing.assert_allclose(vectors[name], found, atol=1e-5)
    answer = await client.post("/v1/rerank", json={"query": "dog", "documents": ["dog"]})
    query, document = (each / np.linalg.norm(each) for each in vectors.values())
    score = answer.json()["results"][0]["relevance_score"]
    np.testing.assert_allclose(score, query @ document, atol=1e-5)
    body = {"input": "dog", "prompt_name": "retrieval"}
    told = error_of(await client.post("/v1/embeddings", json=body), 400, "prompt_name")
    assert "'separation'" in told["message"]


def test_jina_reranker_v2_has_the_same_layers_with_learned_positions(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path, "xlm-roberta", classifier=True)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    given = inputs(pairs=True)
    with torch.no_grad():
        expected = [
            torch.sigmoid(model(torch.from_numpy(each.token_ids)[None].long()).logits[0])
            for each in given
        ]
    tensors = load_file(folder / "model.safetensors")
    for number in range(2):
        own = f"roberta.encoder.layer.{number}."
        for kind in ("weight", "bias"):
            parts = [
                tensors.pop(f"{own}attention.self.{name}.{kind}")
                for name in ("query", "key", "value")
            ]
            tensors[f"{own}mixer.Wqkv.{kind}"] = torch.cat(parts)
    names = {
        "encoder.layer.": "encoder.layers.",
        "attention.output.dense": "mixer.out_proj",
        "attention.output.LayerNorm": "norm1",
        "output.LayerNorm": "norm2",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        "embeddings.LayerNorm": "emb_ln",
    }
    for theirs, published in names.items():
        tensors = {name.replace(theirs, published): each for name, each in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    content |= {"auto_map": CODE, "position_embedding_type": "absolute"}
    (folder / "config.json").write_text(json.dumps(content))
    np.testing.assert_allclose(run(folder, given), torch.stack(expected), atol=1e-5)
