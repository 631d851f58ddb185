"""Sampling parameters that the model's files name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from piecework.runtime.sampling.defaults import SamplingDefaults, read_sampling_defaults

FILE = "generation_config.json"
SAID = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}


def folder(path: Path, content: Any) -> str:
    (path / FILE).write_text(json.dumps(content))
    return str(path)


def test_a_folders_generation_config_is_read(tmp_path: Path) -> None:
    path = folder(tmp_path, {**SAID, "do_sample": True, "eos_token_id": [1], "max_new_tokens": 64})
    found = read_sampling_defaults("model", path, path)
    assert found.values == {**SAID, "max_new_tokens": 64} and found.source == FILE


def test_a_model_without_advice_has_openais_defaults(tmp_path: Path) -> None:
    path = str(tmp_path)
    assert read_sampling_defaults("model", path, path) == SamplingDefaults()
    path = folder(tmp_path, {"eos_token_id": 2})
    assert read_sampling_defaults("model", path, path) == SamplingDefaults()
    folder(tmp_path, SAID)
    assert read_sampling_defaults("openai", path, path) == SamplingDefaults()


def test_another_folder_or_file_may_be_named(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir(), other.mkdir()
    folder(own, SAID)
    folder(other, {"temperature": 0.3})
    for choice in (other, other / FILE):
        assert read_sampling_defaults(str(choice), str(own), str(own)).values == {
            "temperature": 0.3
        }
    with pytest.raises(ValueError, match=r"--sampling-defaults .*nowhere"):
        read_sampling_defaults(str(tmp_path / "nowhere"), str(own), str(own))


@pytest.mark.parametrize("wrong", ["0.6", True, -1, 1e9, [1], {}])
def test_a_wrong_value_is_left_out_with_a_line_in_the_log(
    tmp_path: Path, wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder(tmp_path, {"temperature": wrong, "top_p": 0.5, "top_k": 0})
    assert read_sampling_defaults("model", path, path).values == {"top_p": 0.5, "top_k": -1}
    assert f"{FILE}: temperature must be" in caplog.text


def test_a_gguf_file_says_it_under_llama_cpps_keys(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    for key, value in (("temp", 0.5), ("top_p", 0.75), ("penalty_repeat", 1.5)):
        writer.add_float32(f"general.sampling.{key}", value)
    writer.add_int32("general.sampling.top_k", 40)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_sampling_defaults("model", str(path), str(path)).values == {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.75,
        "repetition_penalty": 1.5,
    }


def test_the_built_in_alias_has_its_authors_advice(tmp_path: Path) -> None:
    found = read_sampling_defaults("model", "smollm2-135m", str(tmp_path))
    assert found.values == {"temperature": 0.2, "top_p": 0.9}
    assert str(found) == "temperature 0.2, top_p 0.9 (its authors' advice)"
