"""Model folders: whole and sharded ones load; broken ones are one clear line that names what is
wrong.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from loaded_weights import loaded_weights
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from piecework.runtime.config.model import ModelConfig
from piecework.runtime.files.resolve import ALIASES, Packaged, resolve_model_path
from piecework.runtime.loader.hollow import hollow_model
from piecework.runtime.loader.loader import empty_model, load_model, random_model


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = load_model(str(folder), dtype, torch.device("cpu"), False)
    return loaded_weights(model)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


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


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_weight_takes_its_place_in_the_dtype_that_is_asked_for(
    tmp_path: Path, architecture: str
) -> None:
    loaded = load(make_tiny_model(tmp_path, architecture), torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name].bfloat16()) for name, tensor in loaded.items())


def test_a_tied_head_is_the_embedding_whatever_the_file_holds(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, tie_word_embeddings=True)
    edit_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(512, 64)}))
    model = load_model(str(tmp_path), torch.float32, torch.device("cpu"), False)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(
        model.lm_head.weight, load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    )


def test_rotary_tables_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    whole = load(make_tiny_model(tmp_path))
    edit_weights(
        tmp_path,
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        ),
    )
    assert load(tmp_path).keys() == whole.keys()


def test_weights_under_a_second_name_are_passed_over(tmp_path: Path) -> None:
    """Mistral's folders hold the same weights again, with other names of the tensors."""
    make_tiny_model(tmp_path, "mistral")
    save_file(
        {"layers.0.attention.wq.weight": torch.zeros(64, 64)}, tmp_path / "consolidated.safetensors"
    )
    assert len(load(tmp_path)) == len(load_file(tmp_path / "model.safetensors"))


def drop_embedding(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.embed_tokens.weight"]


def add_copy(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "b.safetensors")


def add_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.scales"] = torch.zeros(3)


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "it names no model"),
    "architecture": (
        lambda f: edit_config(f, architectures=["BertModel"]),
        "'BertModel' is not supported; supported: .*Llama",
    ),
    "rope": (
        lambda f: edit_config(
            f, rope_parameters={"rope_type": "mrope", "factor": 2.0, "rope_theta": 1e4}
        ),
        "'mrope' is not supported",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no .safetensors files"),
    "cut off": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:9000]
        ),
        "cut off or broken",
    ),
    "not safetensors": (
        lambda f: (f / "model.safetensors").write_bytes(b"junk"),
        r"model\.safetensors is cut off or broken",
    ),
    "another size": (
        lambda f: edit_config(f, intermediate_size=128),
        r"model\.safetensors: the tensor \S+ has shape .* asks for .*128",
    ),
    "more layers": (
        lambda f: edit_config(f, num_hidden_layers=9),
        r"lacks 54 tensors, for example model\.layers\.3",
    ),
    "fewer layers": (
        lambda f: edit_config(f, num_hidden_layers=1),
        r"model\.safetensors holds the tensor 'model\.layers\.1",
    ),
    "a tensor is missing": (
        lambda f: edit_weights(f, drop_embedding),
        r"lacks 1 tensors, for example model\.embed_tokens\.weight",
    ),
    "a tensor too many": (
        lambda f: edit_weights(f, add_scales),
        r"holds the tensor 'model\.layers\.0\.mlp\.up_proj\.scales",
    ),
    "index": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "index.json is broken",
    ),
    "a tensor twice": (
        add_copy,
        r"a\.safetensors and .*b\.safetensors both hold the tensor model\.norm\.weight; keep",
    ),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_folder_is_one_clear_line(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path)
    breakage, message = BREAKAGES[name]
    breakage(folder)
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def test_a_model_that_does_not_fit_the_memory_is_one_clear_line(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    edit_config(folder, vocab_size=2**30, hidden_size=2**22)
    with pytest.raises(ValueError, match=r"too little memory for the weights in torch\.float32"):
        load(folder)


def test_sizes_that_do_not_fit_are_found_before_anything_of_such_a_size_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path)
    edit_config(folder, hidden_size=2**29, head_dim=2**27)
    monkeypatch.setattr("piecework.runtime.layers.rotary.scaled_frequencies", pytest.fail)
    with pytest.raises(ValueError, match=r"too little memory for the weights in torch\.float32"):
        load(folder)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "asked"), [(Terminal, True), (Terminal, False), (io.StringIO, True)]
)
def test_progress_is_drawn_on_a_terminal_when_asked_and_never_into_a_file(
    stream: type[io.StringIO],
    asked: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_tiny_model(tmp_path)
    capsys.readouterr()
    monkeypatch.setattr("sys.stderr", errors := stream())
    load_model(str(tmp_path), torch.float32, torch.device("cpu"), asked)
    shown = stream is Terminal and asked
    assert ("loading weights" in errors.getvalue()) is shown and bool(errors.getvalue()) is shown
    assert capsys.readouterr().out == ""


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("x")
    for path, message in {
        str(tmp_path / "missing"): "does not exist",
        str(tmp_path / "file.txt"): "neither a folder nor a .gguf file",
        "./missing": "does not exist",
    }.items():
        with pytest.raises(ValueError, match=message):
            resolve_model_path(path)


def test_a_folder_and_a_gguf_file_are_their_own_paths(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    assert resolve_model_path(str(tmp_path)) == str(tmp_path)
    assert resolve_model_path(str(tmp_path / "m.gguf")) == str(tmp_path / "m.gguf")


def test_an_alias_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packed_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs a tool that is not there')")
    (package / "x.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(
        ALIASES, "packed", Packaged("packed_model", "x.gguf", "pip install packed-model", {})
    )
    assert resolve_model_path("packed") == str(package / "x.gguf")


def test_an_alias_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        ALIASES, "absent", Packaged("no_such_package", "x.gguf", "pip install no-such-package", {})
    )
    with pytest.raises(ValueError, match="run: pip install no-such-package"):
        resolve_model_path("absent")


def test_a_hub_id_without_a_network_is_one_clear_line() -> None:
    script = (
        "from piecework.runtime.files.resolve import "
        "resolve_model_path\nresolve_model_path('nobody/nothing')"
    )
    offline = {
        "HF_HUB_OFFLINE": "1",
        "PATH": "",
        "HOME": "/nonexistent",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=offline, check=False
    )
    assert "ValueError: nobody/nothing is no local folder and cannot be fetched" in done.stderr


def test_a_hub_id_is_fetched_without_second_copies_of_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "consolidated.safetensors",
        "original/params.json",
        "pytorch_model.bin",
    ]

    def snapshot_download(
        repository: str, *, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        assert repository == "owner/model"
        fetched = list(
            filter_repo_objects(
                files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        )
        assert fetched == ["config.json", "model-00001-of-00002.safetensors"]
        return "/cache/owner/model"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model_path("owner/model") == "/cache/owner/model"


def test_random_weights_need_the_configuration_alone(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3")
    shapes = {name: tensor.shape for name, tensor in load(folder).items()}
    (folder / "model.safetensors").unlink()
    models = [random_model(str(folder), torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    first, second = (loaded_weights(model) for model in models)
    assert {name: tensor.shape for name, tensor in first.items()} == shapes
    assert all(torch.equal(first[name], second[name]) and first[name].any() for name in shapes)
    # Drawn, not filled with one number: two layers differ.
    assert not torch.equal(
        first["model.layers.0.mlp.down_proj.weight"], first["model.layers.1.mlp.down_proj.weight"]
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_hollow_model_looks_like_the_real_one_and_takes_the_memory_of_one_weight(
    tied: bool, tmp_path: Path
) -> None:
    config = ModelConfig.from_pretrained(
        make_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=tied)
    )
    hollow, real = (
        make(config, torch.bfloat16, torch.device("cpu")) for make in (hollow_model, empty_model)
    )
    described = [
        {
            name: (tensor.shape, tensor.stride(), tensor.dtype, type(tensor))
            for name, tensor in model.state_dict(keep_vars=True).items()
        }
        | {
            name: (buffer.shape, buffer.stride(), buffer.dtype, type(buffer))
            for name, buffer in model.named_buffers()
        }
        for model in (hollow, real)
    ]
    assert described[0] == described[1]
    assert (hollow.lm_head.weight is hollow.model.embed_tokens.weight) == tied
    assert (
        len(
            {
                tensor.untyped_storage().data_ptr()
                for tensor in [*hollow.parameters(), *hollow.buffers()]
            }
        )
        == 1
    )
