"""`piecework cache`: what a person sees of the compiled pieces, and how they move from one machine
to another.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_model

from piecework.cli.main import main
from piecework.compilation.compiler import EagerCompiler
from piecework.compilation.core.errors import CompileError
from piecework.runtime.tiers.segments import Segments
from piecework.runtime.tiers.store import KEY_BYTES


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fill(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Explains a tiny model, which fills the cache; returns how its pieces came to be."""
    flags = [
        "--piecewise-cuda-graph-compiler",
        "eager",
        "--num-threads",
        "1",
        "--dtype",
        "float32",
        "--json",
    ]
    assert main(["explain", "--model-path", str(path), *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    return str({row["state"] for row in told["pieces"]}) + (
        "" if told["trace_seconds"] else " untraced"
    )


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert main(["cache", "ls", "--json"]) == 0
    entries: list[dict[str, object]] = json.loads(capsys.readouterr().out)["entries"]
    return entries


def test_a_list_tells_what_belongs_to_which_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(make_tiny_model(tmp_path / "model"), capsys)
    fill(make_tiny_model(tmp_path / "deeper", num_hidden_layers=5), capsys)
    shallow, deep = "LlamaForCausalLM 3x64 float32", "LlamaForCausalLM 5x64 float32"
    entries = listed(capsys)
    assert sorted(entry["models"] for entry in entries) == sorted(
        [[shallow], [deep], *[[shallow, deep]] * 3]
    )  # type: ignore[type-var]
    assert main(["cache", "ls"]) == 0
    text = capsys.readouterr().out
    assert "3 distinct pieces" in text and "5 entries, " in text and str(tmp_path / "cache") in text


def test_what_cannot_be_compiled_is_shown_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each attempt but that which keeps a piece as it was traced fails."""
    keep, attempts = EagerCompiler.compile, count()

    def fails(compiler: EagerCompiler, *args: Any) -> None:
        if next(attempts) % 2 == 0:
            raise CompileError("an op without a lowering")
        keep(compiler, *args)

    path = make_tiny_model(tmp_path / "model")
    monkeypatch.setattr(EagerCompiler, "compile", fails)
    flags = [
        "--model-path",
        str(path),
        "--piecewise-cuda-graph-compiler",
        "eager",
        "--num-threads",
        "1",
        "--dtype",
        "float32",
    ]
    assert main(["explain", *flags]) == 0
    assert "piece 1 could not be compiled: an op without a lowering" in capsys.readouterr().out
    pieces = [entry for entry in listed(capsys) if entry["kind"] == "piece"]
    assert [(entry["failed"], entry["transient"]) for entry in pieces] == [
        ("an op without a lowering", False)
    ] * 3
    assert main(["cache", "ls"]) == 0
    text = capsys.readouterr().out
    assert (
        "as traced" in text
        and "could not be compiled (an op without a lowering)" in text
        and "cache clear" in text
    )


def test_what_one_machine_exports_another_starts_from(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, archive = make_tiny_model(tmp_path / "model"), str(tmp_path / "pieces.tar.gz")
    assert fill(path, capsys) == "{'compiled'}"
    assert main(["cache", "export", archive]) == 0
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "other"))
    assert main(["cache", "import", archive]) == 0
    capsys.readouterr()
    assert fill(path, capsys) == "{'from the cache'} untraced"


def test_after_clear_nothing_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tiny_model(tmp_path / "model")
    fill(path, capsys)
    assert main(["cache", "clear"]) == 0
    capsys.readouterr()
    assert listed(capsys) == []
    assert fill(path, capsys) == "{'compiled'}"


def test_what_other_compilers_keep_is_shown_and_cleared_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But not what the user has put elsewhere, nor what was not compiled."""
    monkeypatch.delenv("PIECEWORK_KERNELS_DIR", raising=False)
    files = {
        "libraries/a.json": 20,
        "inductor/ab/code.so": 3000,
        "inductor/fxgraph/x": 100,
        "native/avx2.so": 5000,
        "lengths/model.json": 7,
    }
    for name, size in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * size)
    assert main(["cache", "ls", "--json"]) == 0
    told = {
        found["kind"]: (found["num_files"], found["num_bytes"])
        for found in json.loads(capsys.readouterr().out)["folders"]
    }
    assert told == {"inductor": (2, 3100), "libraries": (1, 20), "native": (1, 5000)}
    assert main(["cache", "ls"]) == 0
    text = capsys.readouterr().out
    assert (
        "2 files" in text
        and "diffusion models, by torch.compile" in text
        and "kernels for this CPU" in text
    )

    monkeypatch.setenv("PIECEWORK_KERNELS_DIR", str(folder.parent / "kernels"))
    assert main(["cache", "clear"]) == 0
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == [
        "avx2.so",
        "model.json",
    ]
    monkeypatch.delenv("PIECEWORK_KERNELS_DIR")
    assert main(["cache", "clear"]) == 0
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["model.json"]


@pytest.mark.parametrize("action", ["import", "export"])
@pytest.mark.parametrize("file", ["/nowhere/x.tar.gz", "/"])
def test_a_file_that_cannot_be_is_one_line(
    action: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", action, file]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"piecework cache {action}: error: {file}") and error.count("\n") == 1


def test_a_foreign_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("hello")
    assert main(["cache", "import", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert "is no whole archive of a compile cache" in error and error.count("\n") == 1


def test_a_folder_that_cannot_be_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "file"))
    assert main(["cache", "ls"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_action_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 2
    assert "ls" in capsys.readouterr().err


def test_an_archive_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    assert main(["cache", "import", "/nowhere"]) == 2
    assert (
        capsys.readouterr().err
        == "piecework cache import: error: /nowhere: there is no such file\n"
    )


def test_a_folder_of_blocks_is_described_measured_and_pruned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Segments(tmp_path, 1 << 30)
    for number in range(5):
        assert store.put(bytes([number] * KEY_BYTES), memoryview(bytes(1000)))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["cache", "kv", str(tmp_path), "--measure", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["blocks"], about["damaged_blocks"], about["files"]) == (4, 1, 1)
    assert about["num_bytes"] == len(data) and about["bytes_per_second"] > 0
    assert main(["cache", "kv", str(tmp_path), "--prune", "0"]) == 0
    assert "0 blocks, 0.0 MiB in 0 files" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    for arguments, told in (
        (["kv", str(tmp_path / "none")], "is not a folder"),
        (["kv", str(tmp_path), "--prune", "some"], "'some' is no size"),
    ):
        assert main(["cache", *arguments]) == 2
        assert told in capsys.readouterr().err
