"""Vectors and scores are those of transformers, followed by what the folder asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pooled_texts import inputs, run, states
from safetensors.torch import load_file
from tiny_encoders import (
    ENCODERS,
    WITH_TYPES,
    make_tiny_embedder,
    make_tiny_encoder,
    write_modules,
)
from transformers import AutoModelForSequenceClassification


@pytest.mark.parametrize("model_type", ENCODERS)
def test_an_encoders_vectors_are_the_mean_of_transformers_states(
    tmp_path: Path, model_type: str
) -> None:
    folder = make_tiny_encoder(tmp_path, model_type)
    given = inputs()
    expected = torch.stack([state.mean(0) for state in states(folder, given)])
    np.testing.assert_allclose(run(folder, given), expected, atol=1e-5)


@pytest.mark.parametrize("model_type", ENCODERS)
def test_a_classifiers_scores_of_pairs_are_those_of_transformers(
    tmp_path: Path, model_type: str
) -> None:
    pooling = {"classifier_pooling": "mean"} if model_type == "modernbert" else {}
    folder = make_tiny_encoder(tmp_path, model_type, classifier=True, **pooling)
    given = inputs(pairs=True)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = []
    with torch.no_grad():
        for each in given:
            ids = torch.from_numpy(each.token_ids)[None].long()
            kinds = (torch.arange(ids.shape[1]) >= each.first)[None].long()
            types = {"token_type_ids": kinds} if model_type in WITH_TYPES else {}
            expected.append(torch.sigmoid(model(ids, **types).logits[0]))
    np.testing.assert_allclose(run(folder, given), torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize(
    "members",
    [
        {"share_att_key": False, "norm_rel_ebd": "none", "position_biased_input": True},
        {"share_att_key": False, "pos_att_type": ["c2p"], "position_buckets": -1},
        {"pos_att_type": ["p2c"], "max_relative_positions": 20, "type_vocab_size": 2},
        {"relative_attention": False, "norm_rel_ebd": "none", "position_biased_input": True},
    ],
    ids=["own projections", "c2p", "p2c", "absolute"],
)
def test_deberta_compares_what_its_config_says(tmp_path: Path, members: dict[str, Any]) -> None:
    folder = make_tiny_encoder(tmp_path, "deberta-v2", **members)
    given = inputs()
    expected = torch.stack([state.mean(0) for state in states(folder, given)])
    np.testing.assert_allclose(run(folder, given), expected, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "gemma2", "phi3"])
def test_a_decoders_vectors_are_its_last_states_normalised(
    tmp_path: Path, architecture: str
) -> None:
    given_window = architecture in ("mistral", "gemma2")
    window = {"sliding_window": 5} if given_window else {}
    folder = make_tiny_embedder(tmp_path, architecture, num_hidden_layers=2, **window)
    given = inputs(512)
    expected = torch.stack([F.normalize(state[-1], dim=0) for state in states(folder, given)])
    np.testing.assert_allclose(run(folder, given), expected, atol=1e-5)


def test_embedding_gemma_sees_both_ways_and_projects_its_mean_twice(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path, "gemma3_text", use_bidirectional_attention=True)
    write_modules(folder, "pooling_mode_mean_tokens", dense=(32, 48, 32), activation="Identity")
    given = inputs()
    weights = [load_file(folder / f"{n}_Dense" / "model.safetensors") for n in (2, 3)]
    expected = torch.stack([state.mean(0) for state in states(folder, given)])
    for each in weights:
        expected = expected @ each["linear.weight"].T
    np.testing.assert_allclose(run(folder, given), F.normalize(expected), atol=1e-5)


def test_a_decoders_classifier_looks_at_the_last_token(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_labels=1,
        initializer_range=0.2,
        pad_token_id=0,
    )
    Qwen3ForSequenceClassification(config).save_pretrained(tmp_path)
    model, given = Qwen3ForSequenceClassification.from_pretrained(tmp_path).eval(), inputs()
    with torch.no_grad():
        expected = [
            torch.sigmoid(model(torch.from_numpy(each.token_ids)[None].long()).logits[0])
            for each in given
        ]
    np.testing.assert_allclose(run(tmp_path, given), torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize(
    ("mode", "pooled"),
    [
        ("pooling_mode_cls_token", lambda state: state[0]),
        ("pooling_mode_lasttoken", lambda state: state[-1]),
        ("pooling_mode_max_tokens", lambda state: state.amax(0)),
        ("pooling_mode_mean_sqrt_len_tokens", lambda state: state.sum(0) / len(state) ** 0.5),
        (
            "pooling_mode_weightedmean_tokens",
            lambda state: (
                (state * torch.arange(1, len(state) + 1)[:, None]).sum(0)
                / (len(state) * (len(state) + 1) / 2)
            ),
        ),
    ],
)
def test_pooling_is_what_the_folder_says(
    tmp_path: Path, mode: str, pooled: object, bert: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in bert.iterdir():
        (copy / file.name).symlink_to(file)
    write_modules(copy, mode)
    given = inputs()
    vectors = [F.normalize(pooled(state), dim=0) for state in states(bert, given)]  # type: ignore[operator]
    np.testing.assert_allclose(run(copy, given), torch.stack(vectors), atol=1e-5)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("bert"), "bert")
