"""Pieces of a forward are compiled once, come from the cache on the next start, and run as traced
where compiling fails.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from toy_forward import ToyModel, step

from piecework.compilation.cache import CompileCache
from piecework.compilation.compiler import EagerCompiler, InductorCompiler, piece_compiler
from piecework.compilation.core.errors import CompileError, NotStoredError, TraceError
from piecework.compilation.piece_maker import PieceMaker, is_transient, run
from piecework.compilation.piece_store import PiecesReport, PieceStore
from piecework.compilation.piecewise import PiecewiseForward
from piecework.compilation.shapes import TensorSpec
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.npu.platform import NpuPlatform

MODEL = "toy of 3 layers"


class CountingCompiler(EagerCompiler):
    """Compiles as eager does, and fails at pieces of its choice."""

    def __init__(
        self, fail: Sequence[int] = (), setting: int = 0, error: Exception | None = None
    ) -> None:
        self.compiled = 0
        self._fail, self._setting = fail, setting
        self._error = error or CompileError("no compiler for this")

    def options(self) -> dict[str, object]:
        return {"setting": self._setting}

    def compile(self, graph: fx.Graph, example_inputs: Sequence[TensorSpec], path: Path) -> None:
        self.compiled += 1
        if self.compiled - 1 in self._fail:
            raise self._error
        super().compile(graph, example_inputs, path)


def store(folder: Path, compiler: EagerCompiler) -> PieceStore:
    return PieceStore(
        platform=CpuPlatform(), compiler=compiler, cache=CompileCache(folder), max_tokens=512
    )


def make_pieces(
    folder: Path,
    model: nn.Module | None = None,
    *,
    model_key: str | None = MODEL,
    compiler: EagerCompiler | None = None,
) -> tuple[PiecewiseForward, PiecesReport]:
    compiler = compiler or CountingCompiler()
    maker = PieceMaker(
        platform=CpuPlatform(), compiler=compiler, cache=CompileCache(folder), max_tokens=512
    )
    return maker.make(model or ToyModel(3), step(6), model_key=model_key)


def check(pieces: PiecewiseForward, model: nn.Module) -> None:
    assert torch.equal(pieces(*step(11)), model(*step(11)))


def test_each_distinct_piece_is_compiled_once(tmp_path: Path) -> None:
    compiler = CountingCompiler()
    _, report = make_pieces(tmp_path, ToyModel(9), compiler=compiler)
    assert compiler.compiled == 3
    assert sorted(report.compile_seconds) == [0, 1, 2]
    assert report.loaded == {}


def test_a_warm_start_neither_traces_nor_compiles(tmp_path: Path) -> None:
    make_pieces(tmp_path)
    model, compiler = ToyModel(3, seed=5), CountingCompiler()
    pieces, report = make_pieces(tmp_path, model, compiler=compiler)
    assert compiler.compiled == 0
    assert not report.traced
    assert sorted(report.loaded) == [0, 1, 2]
    check(pieces, model)


def test_without_a_model_key_a_warm_start_traces_only(tmp_path: Path) -> None:
    make_pieces(tmp_path, model_key=None)
    _, report = make_pieces(tmp_path, model_key=None)
    assert report.traced
    assert report.compile_seconds == {}


def test_a_deeper_model_of_the_same_layers_compiles_nothing(tmp_path: Path) -> None:
    make_pieces(tmp_path)
    model, compiler = ToyModel(7), CountingCompiler()
    pieces, _ = make_pieces(tmp_path, model, model_key="toy of 7 layers", compiler=compiler)
    assert compiler.compiled == 0
    check(pieces, model)


def test_other_options_compile_anew(tmp_path: Path) -> None:
    make_pieces(tmp_path)
    compiler = CountingCompiler(setting=1)
    make_pieces(tmp_path, compiler=compiler)
    assert compiler.compiled == 3


def test_a_model_of_another_kind_under_the_same_key_is_traced(tmp_path: Path) -> None:
    make_pieces(tmp_path)
    model = ToyModel(3)
    model.layers[0].qkv.weight = nn.Parameter(
        model.layers[0].qkv.weight.double().float().t().contiguous().t(), requires_grad=False
    )
    pieces, report = make_pieces(tmp_path, model)
    assert report.traced
    check(pieces, model)


@pytest.mark.parametrize("damage", [b"", b"half of it"])
def test_damaged_entries_are_replaced(tmp_path: Path, damage: bytes) -> None:
    make_pieces(tmp_path)
    for path in tmp_path.glob("*.graph"):
        path.write_bytes(damage)
    for path in tmp_path.glob("*.json"):
        if "pieces" in path.read_text():
            path.write_bytes(damage)
    model, compiler = ToyModel(3), CountingCompiler()
    pieces, _ = make_pieces(tmp_path, model, compiler=compiler)
    assert compiler.compiled == 3
    check(pieces, model)
    assert not make_pieces(tmp_path)[1].traced


def test_an_entry_that_cannot_be_loaded_is_replaced(tmp_path: Path) -> None:
    make_pieces(tmp_path)
    cache = CompileCache(tmp_path)
    for entry in cache.entries():
        if entry.about["kind"] == "piece":
            with cache.work_folder() as folder:
                (folder / "x.graph").write_bytes(b"whole, but no graph")
                cache.put(entry.key, folder / "x.graph", entry.about)
    model = ToyModel(3)
    pieces, report = make_pieces(tmp_path, model)
    check(pieces, model)
    assert len(report.compile_seconds) == 3


def entry_of_failure(folder: Path) -> dict[str, object]:
    (entry,) = [entry for entry in CompileCache(folder).entries() if "failed" in entry.about]
    return entry.about


def test_a_piece_that_cannot_be_compiled_runs_as_traced(tmp_path: Path) -> None:
    model = ToyModel(3)
    pieces, report = make_pieces(tmp_path, model, compiler=CountingCompiler(fail=[1]))
    check(pieces, model)
    assert report.failed == {1: "no compiler for this"}


def test_what_cannot_be_compiled_is_an_entry_that_is_loaded_without_another_attempt(
    tmp_path: Path,
) -> None:
    make_pieces(tmp_path, compiler=CountingCompiler(fail=[1]))
    model, compiler = ToyModel(3, seed=5), CountingCompiler()
    pieces, report = run(store(tmp_path, compiler).load(model, MODEL))
    check(pieces, model)
    assert (compiler.compiled, report.failed) == (0, {1: "no compiler for this"})
    assert (
        make_pieces(tmp_path, compiler=compiler)[1].failed == report.failed
        and compiler.compiled == 0
    )


def test_another_compiler_tries_anew_what_one_could_not_compile(tmp_path: Path) -> None:
    make_pieces(tmp_path, compiler=CountingCompiler(fail=[1]))
    _, report = make_pieces(tmp_path, compiler=CountingCompiler(setting=1))
    assert sorted(report.compile_seconds) == [0, 1, 2] and report.failed == {}


@pytest.mark.parametrize(
    "error",
    [
        CompileError("g++: fatal error: Killed signal terminated program cc1plus"),
        CompileError("cc1plus: out of memory allocating 65536 bytes"),
        OSError(errno.ENOSPC, "No space left on device"),
        MemoryError(),
    ],
    ids=["a killed compiler", "a compiler without memory", "a full disk", "no memory"],
)
def test_what_the_machine_failed_to_compile_may_be_compiled_later(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [CompileError("g++: fatal error: Killed signal terminated program cc1plus"), MemoryError()],
    ids=["a killed compiler", "no memory"],
)
def test_what_the_machine_failed_to_compile_is_tried_again_at_the_next_start_and_not_before(
    error: Exception, tmp_path: Path
) -> None:
    make_pieces(tmp_path, compiler=CountingCompiler(fail=[1], error=error))
    assert entry_of_failure(tmp_path)["transient"] is True
    model, compiler = ToyModel(3), CountingCompiler()
    loaded, report = run(store(tmp_path, compiler).load(model, MODEL, retry=False))
    check(loaded, model)
    assert compiler.compiled == 0 and list(report.failed) == [1]
    with pytest.raises(NotStoredError, match="piece 1 of 3"):
        run(store(tmp_path, compiler).load(model, MODEL))
    _, report = make_pieces(tmp_path, compiler=compiler)
    assert (compiler.compiled, report.failed) == (1, {})
    assert run(store(tmp_path, compiler).load(model, MODEL)).report.failed == {}


def test_what_wraps_an_error_of_the_machine_is_one(tmp_path: Path) -> None:
    wrapped = CompileError("C++ compile error")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert is_transient(wrapped) and not is_transient(CompileError("an op without a lowering"))


def test_a_full_disk_leaves_pieces_as_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*args: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CompileCache, "put", no_space)
    model = ToyModel(3)
    pieces, report = make_pieces(tmp_path, model)
    check(pieces, model)
    assert len(report.failed) == 3


def test_a_tensor_without_a_name_is_bound_but_no_plan_kept(tmp_path: Path) -> None:
    table = torch.rand(512)

    class Unnamed(nn.Module):
        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return table[positions] * input_ids

    model = Unnamed()
    check(make_pieces(tmp_path, model)[0], model)
    pieces, report = make_pieces(tmp_path, model)
    assert report.traced
    check(pieces, model)


def test_a_forward_that_cannot_be_traced_is_refused_in_one_line(tmp_path: Path) -> None:
    class Breaking(nn.Module):
        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return input_ids + positions

    with pytest.raises(TraceError) as caught:
        make_pieces(tmp_path, Breaking())
    assert "\n" not in str(caught.value)
    assert "test_piece_maker.py:" in str(caught.value)


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    maker = PieceMaker(
        platform=CpuPlatform(),
        compiler=EagerCompiler(),
        cache=CompileCache(tmp_path),
        max_tokens=512,
        progress=lambda done, total: told.append((done, total)),
    )
    maker.make(ToyModel(3), step(6))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_the_platform_chooses_the_compiler() -> None:
    assert isinstance(piece_compiler(None, CpuPlatform()), InductorCompiler)
    assert isinstance(piece_compiler("eager", CpuPlatform()), EagerCompiler)


def test_an_npu_takes_eager_and_says_so_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    npu = NpuPlatform.__new__(NpuPlatform)
    assert isinstance(piece_compiler("inductor", npu), EagerCompiler)
    (record,) = caplog.records
    assert "inductor is not available on npu: eager is used" in record.message


def test_an_unknown_compiler_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of eager, inductor"):
        piece_compiler("gcc", CpuPlatform())
