"""A path that holds no model that we serve is told why, in one line, before torch is imported or a
weight read.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from examples import examples
from gguf_models import Kind, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sparse import diagonal
from tiny_models import make_tiny_model

from piecework.runtime.files.folder import read_header
from piecework.runtime.files.resolve import resolve_model_path
from piecework.runtime.loader.check import check_model, first_numbers
from piecework.runtime.loader.loader import load_model
from piecework.runtime.tokenizer.tokenizer import load_tokenizer

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 269060552\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "model")


def check(path: Path, context_length: int | None = None) -> None:
    check_model(resolve_model_path(str(path)), context_length=context_length, weights=True)


def only(folder: Path, *names: str) -> None:
    """The folder with these files alone, empty ones where it had none."""
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
    for name in names:
        (folder / name).touch()


def as_adapter(folder: Path) -> None:
    only(folder, "adapter_config.json", "adapter_model.safetensors", "README.md")
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B", "peft_type": "LORA"})
    )


def as_float8(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(
        {**weights, name: weights[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors"
    )


def as_integers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name].to(torch.int32)}, folder / "model.safetensors")


def as_shards(folder: Path) -> None:
    """Three shards by the index, of which two never arrived."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00003.safetensors")
    names = {f"tensor{number}": f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def cut_off(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def as_adapter_with_a_config(folder: Path) -> None:
    only(folder, "config.json", "adapter_config.json", "adapter_model.safetensors")


def as_files_of_llama_cpp(folder: Path) -> None:
    only(folder, *(f"m.{kind}.gguf" for kind in ("Q4_0", "Q4_1", "Q5_0", "Q8_0")))


def write(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a LoRA adapter": (
        as_adapter,
        r"holds a LoRA adapter for Qwen/Qwen3-0\.6B, no model; merge it",
    ),
    "an adapter beside a config": (as_adapter_with_a_config, "a LoRA adapter, no model"),
    "a git-lfs pointer": (
        lambda f: write(f, POINTER),
        r"model\.safetensors is a git-lfs pointer .* lfs pull",
    ),
    "float8 without a config": (
        as_float8,
        r"up_proj\.weight as float8, but config\.json has no quantization_config",
    ),
    "integers": (
        as_integers,
        r"up_proj\.weight as I32, but config\.json has no quantization_config",
    ),
    "quantised": (
        lambda f: edit_config(f, quantization_config={"quant_method": "bitsandbytes"}),
        "quantised by bitsandbytes are not supported; supported: .*compressed-tensors, ",
    ),
    "pytorch_model.bin": (
        lambda f: only(f, "config.json", "pytorch_model.bin"),
        r"in pytorch_model\.bin, .* save_pretrained",
    ),
    "nothing": (lambda f: only(f), "is empty"),
    "no weights": (
        lambda f: only(f, "config.json", "tokenizer.json"),
        r"has no \.safetensors files",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    "several GGUF files": (
        as_files_of_llama_cpp,
        r"m\.Q4_0\.gguf, m\.Q4_1\.gguf, m\.Q5_0\.gguf and 1 more; name the file to serve: "
        r".*/m\.Q4_0\.gguf$",
    ),
    "missing shards": (
        as_shards,
        r"lacks model-00002-of-00003\S+, model-00003-of-00003\S+ of 3 files that its index names",
    ),
    "a file cut off": (
        cut_off,
        r"model\.safetensors is cut off .*: it has [\d,]+ of [\d,]+ bytes; download it again",
    ),
    "a file of noise": (
        lambda f: write(f, b"\xff" * 500),
        "cut off or broken: it does not begin with a header",
    ),
    "an empty file": (lambda f: write(f, b""), "cut off or broken"),
    "an architecture": (
        lambda f: edit_config(f, architectures=["GPT2LMHeadModel"]),
        "'GPT2LMHeadModel' is not supported",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_folder_that_is_no_model_is_told_why(folder: Path, name: str) -> None:
    fault, reason = FAULTS[name]
    fault(folder)
    for attempt in (
        check,
        lambda path: load_model(str(path), torch.float32, torch.device("cpu"), False),
    ):
        with pytest.raises(ValueError, match=reason) as error:
            attempt(folder)
        assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_a_whole_model_passes(folder: Path) -> None:
    check(folder)
    as_shards(folder)
    for number in (2, 3):
        save_file({}, folder / f"model-0000{number}-of-00003.safetensors")
    check(folder)


def test_random_weights_need_no_files(folder: Path) -> None:
    only(folder, "config.json")
    check_model(str(folder), context_length=None, weights=False)


def test_one_file_of_a_model_names_the_folder(folder: Path) -> None:
    with pytest.raises(ValueError, match=f"is one file of a model; name the folder .*: {folder}$"):
        check(folder / "model.safetensors")


def test_a_context_beyond_the_model_s_is_refused_before_the_weights_are_looked_at(
    folder: Path,
) -> None:
    (folder / "model.safetensors").unlink()
    edit_config(folder, max_position_embeddings=512)
    with pytest.raises(ValueError, match=r"lacks|has no \.safetensors"):
        check(folder, 512)
    with pytest.raises(ValueError, match="--context-length 513 is more than the model's 512"):
        check_model(str(folder), context_length=513, weights=False)


def test_a_gguf_file_is_judged_by_its_first_metadata(folder: Path) -> None:
    path = folder / "m.gguf"
    write_gguf(folder, path, "llama", Kind.F16)
    check(path, 4096)
    with pytest.raises(ValueError, match="--context-length 4097 is more than the model's 4096"):
        check(path, 4097)
    path.write_bytes(path.read_bytes().replace(b"llama", b"llamb"))
    with pytest.raises(ValueError, match=r"m\.gguf: the architecture 'llamb' is not supported"):
        check(path)


def test_a_gguf_file_without_attention_has_no_heads_to_split(folder: Path) -> None:
    path = folder / "model.gguf"
    write_gguf(folder, path, "llama", Kind.F16, attention__head_count=0)
    check(path)


@settings(
    max_examples=examples(80, exploring=200),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(begin=st.binary(max_size=64), version=st.integers(0, 4), end=st.integers(0, 400))
def test_a_gguf_file_of_whatever_bytes_is_left_to_its_reader(
    folder: Path, begin: bytes, version: int, end: int
) -> None:
    path = folder / "m.gguf"
    if not path.is_file():
        write_gguf(folder, path, "llama", Kind.F16)
    whole = path.read_bytes()
    for content in (
        begin,
        b"GGUF" + version.to_bytes(4, "little") + begin,
        whole[:end],
        whole[:24] + begin,
    ):
        other = folder / "other.gguf"
        other.write_bytes(content)
        found = first_numbers(other)
        assert found is None or found[:2] == ("llama", 4096)


NESTED = "[" * 100_000
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
HEADERS = st.dictionaries(
    st.sampled_from(["a", "__metadata__"]),
    st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), JSON) | JSON,
)


@given(
    st.binary(max_size=80)
    | (HEADERS.map(json.dumps) | st.just(NESTED)).map(lambda text: text.encode())
)
def test_a_header_of_whatever_an_attacker_writes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "header.safetensors"
    for content in (text, len(text).to_bytes(8, "little") + text, b"\xff" * 8 + text):
        path.write_bytes(content)
        try:
            read_header(path)
        except ValueError as error:
            assert str(path) in str(error)


def test_an_index_names_files_of_its_folder_only(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.safetensors").write_bytes(b"")
    for name in (
        "../other.safetensors",
        str(tmp_path / "other.safetensors"),
        "sub/a.safetensors",
        5,
    ):
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": name}})
        )
        with pytest.raises(
            ValueError, match="outside of the folder" if isinstance(name, str) else "lacks 5"
        ):
            check(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "adapter_config.json"]
)
def test_json_that_is_nested_without_end_is_refused(folder: Path, name: str) -> None:
    if name == "adapter_config.json":
        as_adapter(folder)
    (folder / name).write_text(NESTED)
    with pytest.raises(ValueError, match=str(folder)):
        check(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "m.gguf"])
def test_a_pointer_in_the_place_of_a_tokenizer_or_a_gguf_file_is_told(
    folder: Path, name: str
) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / name).write_bytes(POINTER)
    with pytest.raises(
        ValueError,
        match=f"{name} is a git-lfs pointer and not the file itself; run: git -C {folder} lfs pull",
    ):
        check(folder / name) if name.endswith(".gguf") else load_tokenizer(str(folder))


def test_a_folder_that_cannot_be_read_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(ValueError, match=f"{folder} cannot be read: Permission denied"):
        check(folder)
    with pytest.raises(ValueError, match="cannot be read: File name too long"):
        check(Path("/" + "x" * 5000))


@pytest.mark.parametrize(
    ("command", "fault"),
    diagonal(
        ["serve", "explain"], ["an architecture", "a context", "a LoRA adapter", "a file cut off"]
    ),
)
def test_a_refusal_imports_nothing_heavy(folder: Path, command: str, fault: str) -> None:
    """So it takes a tenth of a second, and no model that is refused costs the load of its
    weights.
    """
    argv = [command, str(folder)]
    if fault == "a context":
        argv += ["--context-length", "99999"]
    else:
        FAULTS[fault][0](folder)
    if fault == "an architecture":
        argv += ["--model-impl", "piecework"]
    code = (
        f"import sys\nfrom piecework.cli.main import main\ncode = main({argv!r})\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'pydantic', 'numpy', 'zmq'} & "
        "set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"piecework {command}: error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("asked", "held", "answer"),
    [
        ("awq", None, r"--quantization awq, but the weights of \S+ are not quantised; .* by awq"),
        ("gptq", "awq", "--quantization gptq, but the weights of .* quantised by awq; .* by gptq"),
        ("int8", "awq", "int8 needs weights of 16 bits, but those of .* are quantised by awq"),
        ("awq", "gguf", "--quantization awq, but the weights of .* are quantised by gguf"),
        ("awq", "awq", None),
        ("fp8", "fp8", None),
        ("fp8", None, None),
        ("gguf", "gguf", None),
        ("none", "awq", None),
    ],
)
def test_a_format_that_the_checkpoint_does_not_have_is_refused_with_both_names(
    folder: Path, asked: str, held: str | None, answer: str | None
) -> None:
    path = resolve_model_path("smollm2-135m") if held == "gguf" else str(folder)
    if held not in (None, "gguf"):
        file = folder / "config.json"
        config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": held}}
        file.write_text(json.dumps(config))
    expected = pytest.raises(ValueError, match=answer) if answer else contextlib.nullcontext()
    with expected:
        check_model(path, context_length=None, weights=False, quantization=asked)
