"""Which folders make vectors, and what is refused before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_encoders import write_modules

from piecework.runtime.pooling.folder import makes_vectors, read_folder


def write(folder: Path, architecture: str, **members: Any) -> str:
    content = {"architectures": [architecture], "model_type": "bert", **members}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("BertModel", True),
        ("ModernBertModel", True),
        ("XLMRobertaForSequenceClassification", True),
        ("Qwen3ForSequenceClassification", True),
        ("Qwen3Model", True),
        ("Gemma3TextModel", True),
        ("Qwen3ForCausalLM", False),
        ("LlamaForCausalLM", False),
        ("T5ForConditionalGeneration", False),
    ],
)
def test_an_architecture_says_what_a_folder_is_for(
    tmp_path: Path, architecture: str, expected: bool
) -> None:
    assert makes_vectors(write(tmp_path, architecture)) is expected


def test_modules_make_an_embedder_of_a_decoder(tmp_path: Path) -> None:
    path = write(tmp_path, "Qwen3ForCausalLM", model_type="qwen3")
    write_modules(tmp_path, "pooling_mode_lasttoken", dense=(4, 2))
    folder = read_folder(path)
    assert makes_vectors(path) and folder.decoder == "Qwen3ForCausalLM"
    assert folder.modes == ("lasttoken",) and folder.normalizes
    assert [(dense.in_features, dense.activation) for dense in folder.denses] == [(4, "Tanh")]


def test_prompts_are_those_of_sentence_transformers_file(tmp_path: Path) -> None:
    texts = {"query": "task: search | query: ", "passage": "text: ", "other": "x "}
    path = write(tmp_path, "BertModel")
    write_modules(tmp_path, "pooling_mode_mean_tokens", prompts=texts, default_prompt="other")
    prompts = read_folder(path).prompts
    assert prompts.of_query.text == texts["query"]
    assert prompts.of_document.text == texts["passage"]
    assert prompts.start(None).text == "x " and prompts.start("passage").text == "text: "


@pytest.mark.parametrize(
    ("content", "pooling", "reason"),
    [
        ({"prompts": {"query": 3}}, {}, "prompts must be texts"),
        ({"prompts": ["query: "]}, {}, "prompts must be texts"),
        ({"prompts": {"query": "a"}, "default_prompt_name": "b"}, {}, "none of the prompts"),
        ({"prompts": {"query": "a"}}, {"include_prompt": False}, "include_prompt"),
    ],
)
def test_prompts_that_cannot_be_followed_are_refused(
    tmp_path: Path, content: dict[str, Any], pooling: dict[str, Any], reason: str
) -> None:
    path = write(tmp_path, "BertModel")
    write_modules(tmp_path, "pooling_mode_mean_tokens")
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(content))
    config = {"pooling_mode_mean_tokens": True, **pooling}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=reason):
        read_folder(path)


def test_a_projection_of_the_tokens_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "BertModel")
    write_modules(tmp_path, "pooling_mode_mean_tokens", dense=(4, 2))
    file = tmp_path / "2_Dense" / "config.json"
    content = json.loads(file.read_text()) | {"module_input_name": "token_embeddings"}
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="module_input_name"):
        read_folder(path)


@pytest.mark.parametrize(
    ("members", "activation"),
    [
        ({}, "Sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
         "Identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, "Tanh"),
    ],
)  # fmt: skip
def test_a_classifiers_activation_is_the_folders(
    tmp_path: Path, members: dict[str, Any], activation: str
) -> None:
    path = write(tmp_path, "BertForSequenceClassification", num_labels=1, **members)
    assert read_folder(path).activation == activation


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"model_max_length": 40}}, 40),
        (
            {
                "tokenizer_config.json": {"model_max_length": 40},
                "sentence_bert_config.json": {"max_seq_length": 20},
            },
            20,
        ),
        (
            {
                "tokenizer_config.json": {"model_max_length": 40},
                "sentence_bert_config.json": {"transformer_task": "feature-extraction"},
            },
            40,
        ),
    ],
    ids=["none", "tokenizer", "version 2", "version 6"],
)
def test_the_longest_text_is_where_each_version_of_sentence_transformers_writes_it(
    tmp_path: Path, files: dict[str, Any], expected: int | None
) -> None:
    path = write(tmp_path, "BertModel")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_folder(path).max_length == expected


@pytest.mark.parametrize("broken", ["nothing", "[1]", '{"architectures": 3}', "{", "[]", '"x"'])
def test_a_folder_of_whatever_is_no_embedder_and_said_to_be_none(
    tmp_path: Path, broken: str
) -> None:
    (tmp_path / "config.json").write_text(broken)
    assert not makes_vectors(str(tmp_path))
    with pytest.raises(ValueError, match=r"config\.json"):
        read_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([], "begins with no Transformer"),
        ([{"type": "a.Pooling", "path": ""}], "begins with no Transformer"),
        ([{"type": "a.Transformer", "path": ""}], "names no Pooling"),
        ([{"type": "a.Transformer", "path": "../elsewhere"}], "outside of the folder"),
        ([{"type": "a.Transformer"}, {"type": "a.SpladePooling", "path": "1"}], "SpladePooling"),
        ([{"path": ""}], "is broken"),
        ({"type": 3}, "is broken"),
    ],
)
def test_modules_that_we_have_not_are_refused(tmp_path: Path, modules: Any, reason: str) -> None:
    path = write(tmp_path, "BertModel")
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=reason):
        read_folder(path)


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"model_type": "roberta"}, "model_type"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        (
            {"architectures": ["BertForSequenceClassification"], "num_labels": 10**9},
            "1000000000 labels",
        ),
        ({"architectures": ["DebertaModel"]}, "DebertaModel.*supported: AlbertModel, BertModel"),
    ],
)
def test_models_that_we_cannot_serve_are_refused(
    tmp_path: Path, members: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        read_folder(write(tmp_path, "BertModel", **members))
