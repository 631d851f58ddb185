"""Fusions on whole models: how often each matches, that nothing else changes, and what its key
says.
"""

from __future__ import annotations

import pytest
import torch
from quantized_models import (
    ARCHITECTURES,
    CONTEXT,
    LAYERS,
    SCHEMES,
    models_with,
    ours,
    quantiser,
    run,
    traced_model,
)

from piecework.compilation.pass_manager import PassManager
from piecework.compilation.passes.common import norm_quant, norm_rotary, silu_quant
from piecework.compilation.passes.config import PassConfig
from piecework.compilation.passes.pattern import Fusion
from piecework.kernels import ops, reference
from piecework.kernels.platform.compilation import Compilation

NORM_QUANT = Fusion("norm_quant", norm_quant.PATTERNS)
NORM_ROTARY = Fusion("norm_rotary", norm_rotary.PATTERNS)
SILU_QUANT = Fusion("silu_quant", silu_quant.PATTERNS)


class Fusing(Compilation):
    """A device whose compiler may fuse what ops mean."""

    device_type = "cpu"


@pytest.fixture
def own_kernels() -> type:
    """Kernels registered for the CPU, of which a test says which there are."""

    class Own:
        pass

    ops.register("cpu", Own)
    return Own


@pytest.mark.parametrize(("architecture", "scheme"), models_with(SCHEMES))
def test_each_norm_and_each_silu_takes_its_quantisation_in(architecture: str, scheme: str) -> None:
    found = traced_model(architecture, scheme)
    before = {tokens: run(found, tokens) for tokens in (1, 2, 5, 33)}
    kind = quantiser(scheme)
    norms = ours(found.graph)["rms_norm"]
    assert ours(found.graph)[f"quantize_{kind}"] == 4 * LAYERS

    assert NORM_QUANT(found.graph, CONTEXT) == 2 * LAYERS
    assert SILU_QUANT(found.graph, CONTEXT) == LAYERS

    found.graph.lint()
    found.shapes.check_guards()
    after = ours(found.graph)
    assert after[f"rms_norm_quantize_{kind}"] == 1
    assert after[f"add_rms_norm_quantize_{kind}"] == 2 * LAYERS - 1
    assert after[f"silu_and_mul_quantize_{kind}"] == LAYERS
    # What attention gives is quantised by itself; the last norm's result is not.
    assert after[f"quantize_{kind}"] == LAYERS
    assert after["silu_and_mul"] == 0 and after["add_rms_norm"] == 1
    assert after["rms_norm"] == norms - 1
    for tokens, expected in before.items():
        assert expected.isfinite().all() and torch.equal(run(found, tokens), expected)
    assert NORM_QUANT(found.graph, CONTEXT) == SILU_QUANT(found.graph, CONTEXT) == 0


@pytest.mark.parametrize("scheme", [None, "per token int8"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_heads_that_are_normalised_are_turned_in_the_same_op(
    architecture: str, scheme: str | None
) -> None:
    found = traced_model(architecture, scheme)
    before = {tokens: run(found, tokens) for tokens in (1, 3, 20)}
    matches = LAYERS if architecture == "qwen3" else 0
    rotations = ours(found.graph)["rotary_embedding"]
    assert NORM_ROTARY(found.graph, CONTEXT) == matches
    found.graph.lint()
    found.shapes.check_guards()
    assert ours(found.graph)["norm_rotary_embedding"] == matches
    assert ours(found.graph)["rotary_embedding"] == rotations - matches
    for tokens, expected in before.items():
        assert torch.equal(run(found, tokens), expected)
    assert NORM_ROTARY(found.graph, CONTEXT) == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_of_16_bits_have_nothing_to_fuse(architecture: str) -> None:
    graph = traced_model(architecture, None).graph
    assert NORM_QUANT(graph, CONTEXT) == SILU_QUANT(graph, CONTEXT) == 0


def test_a_norm_that_others_read_too_stays() -> None:
    graph = traced_model("llama", "per token int8").graph
    norm = next(node for node in graph.nodes if str(node.target) == "piecework.rms_norm.default")
    with graph.inserting_after(norm):
        other = graph.call_method("abs", (norm,))
        other.meta["example_value"] = norm.meta["example_value"]
    output = graph.output_node()
    output.args = ((*output.args[0], other),)
    assert NORM_QUANT(graph, CONTEXT) == 2 * LAYERS - 1
    assert ours(graph)["rms_norm"] == 1


def test_what_is_lowered_after_a_fusion_computes_the_same() -> None:
    found = traced_model("qwen3", "per token int8")
    expected = run(found, 7)
    manager = PassManager(PassConfig.parse("+norm_quant,+silu_quant"), Fusing(), fuses=True)
    matches = manager.run(found.graph, CONTEXT)
    found.shapes.check_guards()
    assert (matches["norm_quant"], matches["silu_quant"]) == (2 * LAYERS, LAYERS)
    assert set(ours(found.graph)) == {"attention", "scaled_linear"}
    assert torch.equal(run(found, 7), expected)


def test_by_itself_a_platform_fuses_what_it_has_kernels_for(own_kernels: type) -> None:
    def keys(text: str) -> list[str]:
        return PassManager(PassConfig.parse(text), Fusing(), fuses=True).key

    none, forced = keys("auto"), keys("+norm_quant")
    assert not any(key.startswith("norm_quant") for key in none)
    assert any(
        key.split() == ["norm_quant", "None", *map(_op, norm_quant.PATTERNS)] for key in forced
    )
    own_kernels.rms_norm_quantize_dynamic = staticmethod(lambda *given: given)  # type: ignore[attr-defined]
    some = keys("auto")
    assert "norm_quant cpu rms_norm_quantize_dynamic" in some
    # A fused op that has a kernel is not lowered, even where the compiler fuses.
    assert set(none[-1].split()) - set(some[-1].split()) == {"rms_norm_quantize_dynamic"}
    assert len({tuple(each) for each in (none, forced, some)}) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_kernel_does_not_take_is_not_fused(own_kernels: type, dtype: torch.dtype) -> None:
    own_kernels.DTYPES = (dtype,)  # type: ignore[attr-defined]
    own_kernels.silu_and_mul_quantize_static = staticmethod(lambda *given: given)  # type: ignore[attr-defined]
    graph = traced_model("llama", "static int8").graph
    taken = LAYERS if dtype == torch.bfloat16 else 0
    manager = PassManager(PassConfig(), Fusing(), fuses=True)
    assert manager.run(graph, CONTEXT)["silu_quant"] == taken
    assert ours(graph)["silu_and_mul_quantize_static"] == taken
    # Asked for, it is fused, and what no kernel takes becomes plain torch again.
    graph = traced_model("llama", "static int8").graph
    manager = PassManager(PassConfig(silu_quant=True), Fusing(), fuses=True)
    assert manager.run(graph, CONTEXT)["silu_quant"] == LAYERS
    assert ours(graph)["silu_and_mul_quantize_static"] == taken


def _op(pattern: object) -> str:
    return str(pattern.op)  # type: ignore[attr-defined]


def test_why_a_pass_is_off_is_told() -> None:
    manager = PassManager(PassConfig.parse("-noop"), Fusing(), fuses=True)
    assert manager.off["noop"] == "by --passes"
    assert "memory" in manager.off["pack_linear"] or "kernel" in manager.off["pack_linear"]


def test_every_fused_op_keeps_the_arguments_of_its_pattern() -> None:
    for pattern in (*norm_quant.PATTERNS, *silu_quant.PATTERNS, *norm_rotary.PATTERNS):
        wanted = [argument.name for argument in pattern.replacement._schema.arguments]
        code = pattern.match.__code__
        assert list(code.co_varnames[: code.co_argcount]) == wanted
        assert hasattr(reference, pattern.op)
