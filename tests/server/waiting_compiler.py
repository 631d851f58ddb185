"""A "compiler" that takes as long as a test wants, and makes the kernels of this test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecework.kernels.cpu.native.build import load_kernels


def use_waiting_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines compile their kernels in `folder`. The file `go` there lets the compiler end. If
    there is a file `fail`, the compiler fails. Models must be in bfloat16 or float32.
    """
    kernels = load_kernels()
    assert kernels is not None
    script = folder / "compiler"
    script.write_text(
        f"""#!/bin/sh
case "$*" in *--version*) echo "compiler of {folder}"; exit;; esac
for each; do [ "$before" = -o ] && out=$each; before=$each; done
case "$*" in
*-shared*)
  while [ ! -e {folder}/go ]; do sleep 0.05; done
  [ ! -e {folder}/fail ] || {{ echo "the disk is on fire" >&2; exit 1; }}
  case "$*" in
  *attention_cache*) cp {kernels.part("float32")._name} "$out";;
  *) cp {kernels._name} "$out";;
  esac;;
*) [ -z "$out" ] || touch "$out";;
esac
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("PIECEWORK_KERNELS_DIR", str(folder / "kernels"))
