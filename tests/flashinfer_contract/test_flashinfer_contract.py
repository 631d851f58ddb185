"""What the backend calls of flashinfer is there, under these names and with these arguments, as flashinfer's own sources say."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tomllib
from pathlib import Path

import flashinfer_standin
import pytest
import torch
from paged_steps import Step

from piecework.kernels.cuda import attention
from piecework.kernels.cuda.attention import FlashInferAttention

WRAPPERS = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")


def test_every_call_binds_to_flashinfers_own_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in binds each; here every method that we use is called: prefills, decodes, and decodes of a recorded plan."""
    called: set[str] = set()
    monkeypatch.setattr(flashinfer_standin._Checked, "called", called)
    monkeypatch.setattr(attention, "_library", lambda: flashinfer_standin)
    used = FlashInferAttention(lambda *tensors: None)
    used._workspace = torch.zeros(16, dtype=torch.uint8)
    for lens in ([(5, 3), (1, 4)], [(1, 4)]):
        Step(lens, page_size=4, heads=4, seed=0).run(used)
    step = Step([(1, 4)], page_size=4, heads=4, seed=0)
    plan = used.capture_plan(1, 2, 4, torch.device("cpu"))
    used.update_plan(plan, step.metadata, 1)
    tensors = (step.q, step.new(step.keys), step.new(step.values), torch.empty_like(step.q), step.k_cache, step.v_cache)
    used.run(*tensors, plan, scale=1.0, window=None)
    assert called == {f"{wrapper}.{method}" for wrapper in WRAPPERS for method in ("__init__", "plan", "run")}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_argument_that_flashinfer_does_not_have_is_found_out(wrapper: str) -> None:
    made = getattr(flashinfer_standin, wrapper)(torch.zeros(16, dtype=torch.uint8), "NHD")
    with pytest.raises(TypeError, match="no_such_argument"):
        made.plan(*[torch.zeros(1)] * 8 if "Prefill" in wrapper else [torch.zeros(1)] * 7, no_such_argument=1)


def test_the_extract_is_of_a_version_that_is_asked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (wanted,) = (line for line in project["project"]["optional-dependencies"]["flashinfer"] if line.startswith("flashinfer-python"))
    from packaging.requirements import Requirement

    assert Requirement(wanted).specifier.contains(flashinfer_standin.EXTRACT["version"])


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_the_extract_is_what_the_installed_flashinfer_says() -> None:
    from extract_flashinfer import signatures

    if importlib.metadata.version("flashinfer-python") != flashinfer_standin.EXTRACT["version"]:
        pytest.skip("another version is installed")
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None and spec.origin is not None
    assert signatures(Path(spec.origin).parent) == flashinfer_standin.EXTRACT["signatures"]
