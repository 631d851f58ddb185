"""torch.compile of models that are not ours: what is compiled, how often, and what is told of
it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piecework.compilation.regional import CompiledModels
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.cuda.platform import CudaPlatform
from piecework.kernels.platform.compilation import Compilation, CompileOptions


class RecordingCompilation(Compilation):
    """Its backend keeps every graph and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def compile_options(self) -> CompileOptions:
        return CompileOptions(backend=self._compile)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


class FailingCompilation(Compilation):
    def compile_options(self) -> CompileOptions:
        return CompileOptions(backend=self._compile)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        raise RuntimeError("no compiler here")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, scale: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return x + torch.tanh(self.inner(x) * scale[0] + scale[1])


class BreakingBlock(Block):
    def forward(self, x: torch.Tensor, scale: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = self.inner(x) * 2
        torch._dynamo.graph_break()
        return x * scale[0]


class Model(nn.Module):
    """Views and tensors of their own reach the blocks by turns, as in FLUX.1."""

    def __init__(self, kind: type[nn.Module] = Block, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(kind(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(2, 1, 1).chunk(2)
        x = self.before(x)[:, 1:]
        for block in self.blocks:
            x = block(x, (scale[0], scale[1]))
        return self.after(x)


class NamingModel(Model):
    _repeated_blocks = ("Block", "BreakingBlock")


def inputs(length: int = 5) -> torch.Tensor:
    return torch.randn(1, length, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    torch.compiler.reset()


@torch.no_grad()
def test_each_class_of_blocks_is_compiled_once_for_all_models() -> None:
    platform, first, second = RecordingCompilation(), NamingModel(depth=4), NamingModel(depth=2)
    expected = [first(inputs()), second(inputs())]
    compiled = CompiledModels(
        {"transformer": first, "transformer_2": second}, platform, regional=True
    )
    assert compiled.regions == {"Block": 6}
    assert [
        torch.equal(model(inputs()), wanted)
        for model, wanted in zip((first, second), expected, strict=True)
    ] == [True, True]
    assert compiled.log.graphs == len(platform.graphs) == 1 and compiled.log.breaks == []
    linears = [node for node in platform.graphs[0].graph.nodes if "linear" in str(node.target)]
    assert len(linears) == 1, "one block, and nothing of what is around it"
    assert compiled.log.seconds > 0


@torch.no_grad()
def test_what_all_blocks_are_given_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more when it has changed."""
    model, copies, plain_clone = NamingModel(depth=5), [], torch.Tensor.clone

    def clone(tensor: torch.Tensor, **settings: Any) -> torch.Tensor:
        copies.append(tensor.shape)
        return plain_clone(tensor, **settings)

    scales = torch.ones(2, 1, 1).chunk(2)

    def run(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = block(x, scales)
        return x

    before = run(inputs())
    CompiledModels({"transformer": model}, RecordingCompilation(), regional=True)
    assert torch.equal(run(inputs()), before)
    monkeypatch.setattr(torch.Tensor, "clone", clone)
    assert torch.equal(run(inputs()), before) and copies == []
    scales[0].mul_(3)
    after = run(inputs())
    assert len(copies) == 2, "both halves lie in one memory, so both may have changed"
    assert not torch.allclose(after, before)


@torch.no_grad()
def test_whole_models_are_one_graph() -> None:
    platform, model = RecordingCompilation(), NamingModel(depth=4)
    expected = model(inputs())
    compiled = CompiledModels({"transformer": model}, platform, regional=False)
    assert torch.equal(model(inputs()), expected)
    assert compiled.regions == {"NamingModel": 1} and compiled.log.graphs == 1
    assert (
        len([node for node in platform.graphs[0].graph.nodes if "linear" in str(node.target)]) == 6
    )


@torch.no_grad()
def test_a_model_that_names_no_blocks_has_lists_of_equal_modules(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model()
    with caplog.at_level(logging.INFO):
        compiled = CompiledModels({"transformer": model}, RecordingCompilation(), regional=True)
    assert compiled.regions == {"Block": 3}
    assert "names no repeated blocks; its lists of equal modules: Block" in caplog.text


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"transformer .Linear. has no repeated blocks; leave --regional-compile out",
    ):
        CompiledModels({"transformer": nn.Linear(2, 2)}, RecordingCompilation(), regional=True)


@torch.no_grad()
def test_a_second_size_compiles_once_and_a_third_not_at_all() -> None:
    model = NamingModel()
    compiled = CompiledModels({"transformer": model}, RecordingCompilation(), regional=True)
    counts = []
    for length in (5, 5, 9, 12, 7):
        model(inputs(length))
        compiled.settle()
        counts.append(compiled.recompiles)
    assert counts == [0, 0, 1, 1, 1]


@torch.no_grad()
def test_graph_breaks_are_told_with_their_place() -> None:
    model = NamingModel(BreakingBlock)
    compiled = CompiledModels({"transformer": model}, RecordingCompilation(), regional=True)
    model(inputs())
    (found,) = set(compiled.log.breaks)
    assert found.file == __file__
    assert "graph_break()" in Path(found.file).read_text().splitlines()[found.line - 1]
    assert compiled.report()["graph_breaks"][0]["line"] == found.line


@torch.no_grad()
def test_a_compiler_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = NamingModel()
    expected = model(inputs())
    compiled = CompiledModels({"transformer": model}, FailingCompilation(), regional=True)
    with pytest.raises(Exception, match="no compiler here") as raised:
        model(inputs())
    assert not compiled.give_up(ValueError("another error"))
    assert compiled.give_up(raised.value)
    assert "torch.compile failed, so the model runs eagerly" in caplog.text
    assert torch.equal(model(inputs()), expected)


@torch.no_grad()
def test_what_wraps_a_block_stays_when_the_compiler_fails() -> None:
    """diffusers splits tokens over ranks, and offloads weights, by a `forward` of its own."""
    model, wrapped = NamingModel(), []
    expected = model(inputs())
    compiled = CompiledModels({"transformer": model}, FailingCompilation(), regional=True)
    first, inner = model.blocks[0], model.blocks[0].forward

    def outer(*arguments: Any) -> torch.Tensor:
        wrapped.append(arguments)
        result: torch.Tensor = inner(*arguments)
        return result

    first.forward = outer  # type: ignore[method-assign]
    with pytest.raises(Exception, match="no compiler here") as raised:
        model(inputs())
    wrapped.clear()
    assert compiled.give_up(raised.value)
    assert torch.equal(model(inputs()), expected) and len(wrapped) == 1


@pytest.mark.slow
@torch.no_grad()
def test_inductor_s_code_is_kept_with_our_pieces_and_found_again(tmp_path: Path) -> None:
    built, expected = [], NamingModel()(inputs())
    for _ in range(2):
        torch.compiler.reset()
        model = NamingModel()
        compiled = CompiledModels({"transformer": model}, CpuPlatform(), regional=True)
        assert torch.allclose(model(inputs()), expected, atol=1e-5)
        built.append((compiled.log.graphs, compiled.log.built))
    assert built == [(1, 1), (1, 0)]
    assert list((tmp_path / "inductor").rglob("*.so"))


def test_the_folder_is_ours_unless_the_user_has_chosen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    for before, after in (
        (default_cache_dir(), str(tmp_path / "inductor")),
        ("/chosen", "/chosen"),
    ):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        CompiledModels({"transformer": NamingModel()}, CpuPlatform(), regional=True)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == after


def test_the_table_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIECEWORK_TORCH_COMPILE_MODE", raising=False)
    cpu, cuda = (
        CpuPlatform().compile_options(),
        CudaPlatform.compile_options(object.__new__(CudaPlatform)),
    )
    assert (cpu.backend, cpu.mode) == ("inductor", "default")
    assert (cuda.backend, cuda.mode) == ("inductor", "max-autotune-no-cudagraphs")
    for options in (cpu, cuda):
        assert options.fullgraph is False and options.dynamic is None
        assert options.settings == {"reorder_for_compute_comm_overlap": True}
    monkeypatch.setenv("PIECEWORK_TORCH_COMPILE_MODE", "reduce-overhead")
    assert CpuPlatform().compile_options().mode == "reduce-overhead"


def test_a_mode_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_TORCH_COMPILE_MODE", "fastest")
    with pytest.raises(
        ValueError, match=r"PIECEWORK_TORCH_COMPILE_MODE must be one of default, .*, got fastest"
    ):
        CompiledModels({"transformer": NamingModel()}, CpuPlatform(), regional=True)
