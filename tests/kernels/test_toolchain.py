"""What a compiler is asked about itself, of compilers that do not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecework.kernels import toolchain

SILENT = {
    "says nothing": "exit 0",
    "fails": "echo 'no such option' >&2; exit 1",
    "hangs": "exec sleep 1000",
}


@pytest.mark.parametrize("body", SILENT.values(), ids=SILENT)
def test_a_compiler_without_an_answer_is_no_clang_within_the_limit(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "_SECONDS", 1)
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{body}\n")
    compiler.chmod(0o755)
    assert not toolchain.is_clang(str(compiler))
