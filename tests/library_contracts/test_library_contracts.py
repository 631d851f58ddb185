"""What is called of flashinfer and sgl-kernel is there, under these names and with these arguments,
as their own sources say.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import flashinfer_standin
import library_ops_standin
import pytest
import torch
from extract_signatures import LIBRARIES, signatures
from paged_steps import Step, latent

from piecework.kernels.cuda import attention
from piecework.kernels.cuda.attention import FlashInferAttention
from piecework.kernels.cuda.libraries import LibraryOps

WRAPPERS = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")


def test_every_call_binds_to_flashinfers_own_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in binds each; here every method that we use is called: prefills, decodes, and
    decodes of a recorded plan.
    """
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
    tensors = (
        step.q,
        step.new(step.keys),
        step.new(step.values),
        torch.empty_like(step.q),
        step.k_cache,
        step.v_cache,
    )
    used.run(*tensors, plan, step.layout())
    latent_step = latent(Step(lens, page_size=4, heads=4, kv_heads=1, head_size=16, seed=0), 8)
    latent_step.run(used)
    assert called == {
        "mla.MLAPlanMetadata.csr",
        *(
            f"{wrapper}.{method}"
            for wrapper in (*WRAPPERS, "mla.BatchMLAPagedAttentionWrapper")
            for method in ("__init__", "plan", "run")
        ),
    }


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_argument_that_flashinfer_does_not_have_is_found_out(wrapper: str) -> None:
    made = getattr(flashinfer_standin, wrapper)(
        torch.zeros(16, dtype=torch.uint8), "NHD", backend="fa2"
    )
    with pytest.raises(TypeError, match="no_such_argument"):
        made.plan(
            *[torch.zeros(1)] * 8 if "Prefill" in wrapper else [torch.zeros(1)] * 7,
            no_such_argument=1,
        )


@pytest.mark.parametrize(
    ("extra", "name", "file"),
    [
        ("flashinfer", "flashinfer-python", "flashinfer"),
        ("sgl-kernel", "sglang-kernel", "sglang_kernel"),
    ],
)
def test_the_extract_is_of_a_version_that_is_asked_for(extra: str, name: str, file: str) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (wanted,) = (
        line for line in project["project"]["optional-dependencies"][extra] if line.startswith(name)
    )
    from packaging.requirements import Requirement

    extract = json.loads((Path(__file__).parent / f"{file}.json").read_text())
    assert Requirement(wanted).specifier.contains(extract["version"])


@pytest.mark.parametrize(
    "make",
    [
        library_ops_standin.sgl_kernel,
        library_ops_standin.sglang_kernel,
        library_ops_standin.flashinfer,
    ],
)
def test_every_op_binds_to_its_library_s_own_signature(make: Callable[[], LibraryOps]) -> None:
    """The stand-in binds each call; here both functions are called."""
    library, x = make(), torch.ones(2, 16, dtype=torch.bfloat16)
    assert library.rms_norm(x, x[0], 1e-5) is not None and library.silu_and_mul(x) is not None
    assert library.module.calls == ["rmsnorm", "silu_and_mul"]
    for function in (library.module.rmsnorm, library.module.silu_and_mul):
        with pytest.raises(TypeError, match="no_such_argument"):
            function(x, x[0], no_such_argument=1)


@pytest.mark.parametrize("name", list(LIBRARIES))
def test_the_extract_is_what_the_installed_library_says(name: str) -> None:
    library = LIBRARIES[name]
    spec = importlib.util.find_spec(library.module)
    try:
        installed = importlib.metadata.version(library.distribution)
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if spec is None or spec.origin is None or installed is None:
        pytest.skip(f"{name} is not installed")
    extract = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    if installed != extract["version"]:
        pytest.skip("another version is installed")
    assert signatures(library, Path(spec.origin).parent) == extract["signatures"]
