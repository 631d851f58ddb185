"""Compiled ahead of time, a piece is right for any number of tokens, and another process loads it
without a compiler.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toy_forward  # noqa: F401  (registers split ops)
from torch import nn

from piecework.compilation.cache import CompileCache
from piecework.compilation.compiler import InductorCompiler
from piecework.compilation.core.split_ops import registered
from piecework.compilation.passes.config import PassConfig
from piecework.compilation.piece_maker import PieceMaker
from piecework.compilation.piece_store import PiecesReport
from piecework.compilation.piecewise import PiecewiseForward
from piecework.kernels.cpu import packed_linear
from piecework.kernels.cpu.platform import CpuPlatform

needs_packing = pytest.mark.skipif(
    not packed_linear.is_available(), reason="oneDNN has no bfloat16 kernels for this CPU"
)
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
FOLDER = Path(__file__).parent


class Small(nn.Module):
    """One piece with matrices of two formats, a reduction, a strided view and a number of tokens in
    its arithmetic.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Parameter(torch.randn(32, 16), requires_grad=False)
        self.weight = nn.Parameter(torch.randn(24, 16), requires_grad=False)
        self.project = nn.Linear(16, 8, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding[input_ids] * positions.unsqueeze(-1)
        gate, up, rest = nn.functional.linear(x, self.weight).split(8, -1)
        y = (nn.functional.silu(gate) * up + rest.mean(-1, keepdim=True)).flatten().view(
            -1, 8
        ) / input_ids.shape[0]
        return y + self.project(x.bfloat16())


class InBfloat16(nn.Module):
    """What a piece of a model computes between two products: sums and a gate, each rounded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        for name, shape in (("embedding", (32, 16)), ("weight", (32, 16)), ("out", (16, 16))):
            numbers = torch.randn(shape, dtype=torch.bfloat16)
            setattr(self, name, nn.Parameter(numbers, requires_grad=False))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding[input_ids] * 0.3 + positions.unsqueeze(-1).bfloat16() * 0.7
        gate, up = nn.functional.linear(x, self.weight).chunk(2, -1)
        y = x + nn.functional.linear(nn.functional.silu(gate) * up, self.out)
        return y * 0.1 + x


def step(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(num_tokens) * 7 % 32, torch.arange(num_tokens) % 5


def make_pieces(
    folder: Path, model: type[nn.Module] = Small, *, keeps_bits: bool = False
) -> tuple[PiecewiseForward, PiecesReport]:
    maker = PieceMaker(
        platform=CpuPlatform(),
        compiler=InductorCompiler(keeps_bits=keeps_bits),
        cache=CompileCache(folder),
        max_tokens=512,
        # A process without a compiler may lack the kernels that the pass needs.
        passes=PassConfig(pack_linear=packed_linear.is_available(), attention_quant=False),
    )
    return maker.make(model(), step(6), model_key=model.__name__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cache")
    _, report = make_pieces(path)
    assert report.failed == {}
    assert list(report.compile_seconds) == [0]
    return path


@pytest.mark.parametrize("num_tokens", [1, 2, 6, 63, 64, 300])
def test_equals_eager_at_any_number_of_tokens(folder: Path, num_tokens: int) -> None:
    pieces, report = make_pieces(folder)
    assert report.compile_seconds == {}
    torch.testing.assert_close(
        pieces(*step(num_tokens)), Small()(*step(num_tokens)), rtol=1e-5, atol=1e-5
    )


def test_bfloat16_has_the_bits_of_eager(folder: Path) -> None:
    """A server answers eagerly until its pieces come in: no client may see that they do."""
    pieces, report = make_pieces(folder, InBfloat16, keeps_bits=True)
    assert list(report.compile_seconds) == [0]
    for num_tokens in (1, 6, 63):
        assert torch.equal(pieces(*step(num_tokens)), InBfloat16()(*step(num_tokens)))


def test_a_warm_start_in_a_new_process_needs_no_compiler(folder: Path) -> None:
    program = (
        f"import sys, json; sys.path[:0] = [{str(FOLDER)!r}]\n"
        "import torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "import toy_forward  # registers the split ops that the plan was cut at\n"
        "from test_inductor import make_pieces, step\n"
        # A plan is good where the same ops are split ops; other tests of this process may have
        # registered more.
        "from piecework.compilation.core.split_ops import register_split_op\n"
        f"for name in set({registered()}) - {{'toy::attend', 'toy::attend_fresh', 'toy::pair'}}: "
        "register_split_op(name, print)\n"
        f"pieces, report = make_pieces(Path({str(folder)!r}))\n"
        "inductor = [name for name in sys.modules if name.startswith(('torch._inductor', "
        "'torch._dynamo'))]\n"
        "print(json.dumps([report.traced, report.compile_seconds, sorted(report.loaded), inductor, "
        "pieces(*step(9)).tolist()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    traced, compiled, loaded, inductor, output = json.loads(done.stdout)
    assert (traced, compiled, loaded, inductor) == (False, {}, [0], [])
    torch.testing.assert_close(torch.tensor(output), Small()(*step(9)), rtol=1e-5, atol=1e-5)


@needs_packing
def test_projections_in_bfloat16_read_packed_weights(folder: Path) -> None:
    pieces, _ = make_pieces(folder)
    packed = [
        pieces.plan.weights[step.inputs[place]]
        for step in pieces.plan.steps
        for place in pieces._pieces[0].packed
    ]
    assert packed == ["project.weight"]
    assert sum(weight.is_mkldnn for weight in pieces._weights.values()) == 1


def test_code_for_another_number_of_threads_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    options = InductorCompiler().options()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert InductorCompiler().options() != options
