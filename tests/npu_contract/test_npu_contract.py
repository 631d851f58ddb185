"""The contract checker finds each kind of mistake, and this project's sources make none."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import extract
import npu_contract
import pytest
import torch
from npu_contract import Parameters, assert_no_cpu_fallback, aten_ops, check_sources
from torch import nn

from piecework.kernels.npu.attention import AscendDecodePlan

ROOT = Path(__file__).parents[2]
PRODUCT = ("bench", "compilation", "kernels", "runtime", "server")

RIGHT = """
import torch
import torch_npu
import torch_npu as tn
from torch_npu import npu_swiglu
from torch_npu._C import _weak_ref_tensor
from torchair.configs.compiler_config import CompilerConfig
import torchair

npu = torch.npu
graph = torch.npu.NPUGraph()
pool, stream = torch.npu.graph_pool_handle(), npu.Stream()
with torch.npu.graph(graph, pool=pool, stream=stream, auto_dispatch_capture=True):
    y, rstd = torch.ops.npu.npu_rms_norm(x, gamma, epsilon=1e-6)
    y, rstd = tn.npu_rms_norm(x, gamma, 1e-6)
    y = npu_swiglu(y)
torch_npu.npu.mem_get_info()
torch.ops.atb._npu_reshape_and_cache(k, v, kc, vc, slots)
torch.ops.atb._npu_reshape_and_cache.default(*arguments)
torch_npu._npu_paged_attention(q, kc, vc, 2, 4, 0.5, table, lengths, out=out)
torch_npu.npu_fused_infer_attention_score(q, k, v, **options)
torchair.get_npu_backend(compiler_config=CompilerConfig())
torch.ops.aten.add(x, y, no_such=1)
other.npu.no_such(1)
"""

WRONG = {
    "torch.npu.no_such_name()": "torch.npu.no_such_name: not in torch_npu",
    "torch_npu.npu.no_such_name": "torch.npu.no_such_name: not in torch_npu",
    "torch_npu.npu_no_such_op(x)": "torch_npu.npu_no_such_op: not in torch_npu",
    "torch.ops.npu.npu_no_such_op(x)": "torch.ops.npu.npu_no_such_op: not in torch_npu",
    "torch.ops.atb.npu_rms_norm(x, g)": "torch.ops.atb.npu_rms_norm: not in torch_npu",
    "torch.ops.npu.npu_rms_norm.out(x, g)": "torch.ops.npu.npu_rms_norm.out: not in torch_npu",
    "torch.ops.npu.npu_rms_norm(x, g, eps=1e-6)": "no keyword 'eps'",
    "torch.ops.npu.npu_rms_norm(self=x, gamma=g)": "no keyword 'self'",
    "torch.ops.npu.npu_rms_norm(x)": "'gamma' is missing",
    "torch.ops.npu.npu_rms_norm(x, g, 1e-6, 2)": "4 positional arguments, takes 3",
    "torch.ops.npu.npu_rms_norm(x, g, gamma=g)": "'gamma' is given twice",
    "torch_npu.npu_swiglu(x, axis=-1)": "no keyword 'axis'",
    "torch.ops.atb._npu_paged_attention(q, k, v, 2, 4, .5, t, n)": "'out' is missing",
    "torch.npu.NPUGraph(True)": "1 positional arguments, takes 0",
    "torch.npu.graph(g, mempool=p)": "no keyword 'mempool'",
    "torch.npu.graph()": "'npu_graph' is missing",
    "npu = torch.npu\nnpu.graph(g, mempool=p)": "no keyword 'mempool'",
    "from torch_npu import no_such_name": "torch_npu.no_such_name: not in torch_npu",
    "from torch_npu import npu_rms_norm as norm\nnorm(x, g, eps=1)": "no keyword 'eps'",
    "from torch_npu.npu import graph\ngraph(g, mempool=p)": "no keyword 'mempool'",
    "import torch_npu as tn\ntn.npu_swiglu(x, axis=-1)": "no keyword 'axis'",
    "from torch import npu as device\ndevice.no_such_name()": "torch.npu.no_such_name: not in "
    "torch_npu",
    "from torch.ops import npu as ops\nops.npu_swiglu()": "'input' is missing",
    "import torchair\ntorchair.get_npu_backend(config)": "1 positional arguments, takes 0",
}


def problems_of(folder: Path, source: str) -> list[str]:
    path = folder / "source.py"
    path.write_text(source)
    return [str(problem) for problem in check_sources([path])]


def test_right_uses_pass(tmp_path: Path) -> None:
    assert problems_of(tmp_path, RIGHT) == []


@pytest.mark.parametrize("source", WRONG)
def test_wrong_uses_are_found(tmp_path: Path, source: str) -> None:
    problems = problems_of(tmp_path, f"import torch\nimport torch_npu\n{source}\n")
    assert len(problems) == 1 and WRONG[source] in problems[0]


def test_a_problem_names_file_and_line(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, "import torch\n\nx = [\n    torch.npu.no_such_name()]\n")
    assert problem.startswith(f"{tmp_path / 'source.py'}:4: ")


def test_uses_inside_functions_and_methods_are_found(tmp_path: Path) -> None:
    source = (
        "import torch\nclass A:\n    def f(self):\n        import torch_npu as tn\n        "
        "return lambda x: tn.npu_swiglu(x, axis=1)\n"
    )
    assert len(problems_of(tmp_path, source)) == 1


def test_our_sources_keep_the_contract() -> None:
    sources = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    assert sources
    assert [str(problem) for problem in check_sources(sources)] == []


def attributes_of_graphs(source: str) -> set[str]:
    """What a source asks of `graph` and `self._graph`, which are NPUGraphs."""
    asked = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return {node.attr for node in asked if ast.unparse(node.value) in ("graph", "self._graph")}


def test_what_our_graphs_ask_of_npu_graphs_is_there() -> None:
    known = npu_contract.contract()
    there = {
        name.rpartition(".")[2]
        for name in known["python"]
        if name.startswith("torch.npu.NPUGraph.")
    }
    there |= set(known["attributes"]["torch.npu.NPUGraph"])
    asked = [
        attributes_of_graphs((ROOT / "kernels" / name).read_text())
        for name in ("graph.py", "npu/graph.py")
    ]
    assert asked[0] == {"capture_begin", "capture_end", "replay"} and asked[1] == {
        "update",
        "auto_dispatch_capture",
        "graph_dispatch_mode",
    }
    assert asked[0] | asked[1] <= there


def test_what_our_graphs_ask_of_torch_npus_dispatch_mode_is_there() -> None:
    known = npu_contract.contract()["attributes"]
    source = (ROOT / "kernels" / "npu" / "graph.py").read_text()
    asked = {
        (ast.unparse(node.value), node.attr)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
    }
    assert {name for value, name in asked if value == "mode"} == set(
        known["torch.npu._GraphDispatchMode"]
    )
    assert {name for value, name in asked if value == "record"} == set(
        known["torch.npu._GraphDispatchRecord"]
    )
    assert {f"torch.npu.{name}" for value, name in asked if value in ("npu", "self._npu")} <= set(
        npu_contract.contract()["python"]
    )


def test_lengths_are_updated_by_names_that_torch_npu_knows() -> None:
    plan = AscendDecodePlan(torch.zeros(2), torch.zeros(2, 1), [3, 5], 128, torch.zeros(1))
    names = plan.host_arguments(2).keys()
    assert names and names <= set(
        npu_contract.contract()["updates"]["npu_fused_infer_attention_score.default"]
    )


def test_a_bad_use_among_our_sources_would_be_found(tmp_path: Path) -> None:
    """The walk above reads what it should: one of our files with one line more is found."""
    source = (
        ROOT / "kernels" / "platform" / "memory.py"
    ).read_text() + "\n\ntorch.npu.memory_info()\n"
    assert len(problems_of(tmp_path, source)) == 1


def test_keyword_only_parameters_of_a_signature() -> None:
    parameters = Parameters.of_signature("(a, b=1, *, c, d=2)")
    assert parameters == Parameters(
        positional=["a", "b"], required=1, keyword_only=["c", "d"], keyword_required=["c"]
    )


def test_schemas_parse() -> None:
    for name, schema in npu_contract.contract()["ops"].items():
        assert schema.startswith(name) and Parameters.of_schema(schema).positional


class Piece(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.linear(x))


def dynamo_graph(function: Any) -> torch.fx.GraphModule:
    """What Dynamo hands a compiler for a linear layer and the function after it."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph_module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(Piece(function), backend=backend, fullgraph=True, dynamic=True)(torch.rand(3, 4))
    return graphs[0]


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x.lgamma(), "aten::lgamma"),
        (lambda x: torch.fmax(x, x), "aten::fmax"),
        (lambda x: torch.nonzero_static(x, size=4), "aten::nonzero_static"),
        (
            lambda x: torch.Tensor.index_reduce(x, 0, torch.tensor([0]), x[:1], "mean"),
            "aten::index_reduce",
        ),
    ],
    ids=["lgamma", "fmax", "nonzero_static", "index_reduce"],
)
def test_ops_that_fall_to_the_cpu_are_found_in_a_graph(function: Any, op: str) -> None:
    with pytest.raises(AssertionError, match=op):
        assert_no_cpu_fallback(dynamo_graph(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: nn.functional.silu(x) * x.softmax(-1),
        lambda x: x[torch.tensor([0, 1])].scatter_add(
            0, torch.zeros(2, 4, dtype=torch.int64), x[:2]
        ),
        lambda x: nn.functional.rms_norm(x, (4,)).view(-1, 2, 2).transpose(0, 1).flatten(),
    ],
    ids=["activations", "index, scatter_add", "norm, views"],
)
def test_ops_with_an_npu_kernel_pass(function: Any) -> None:
    assert_no_cpu_fallback(dynamo_graph(function))


def test_a_graph_of_aten_ops_is_read_as_it_is() -> None:
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: (x + 1).lgamma())(torch.rand(3))
    assert aten_ops(graph) == {"aten::add.Tensor", "aten::lgamma"}


def test_checking_leaves_the_compilers_fake_mode_as_it_was() -> None:
    graph = dynamo_graph(lambda x: x + 1)
    (mode,) = {
        n.meta["example_value"].fake_mode
        for n in graph.graph.nodes
        if hasattr(n.meta.get("example_value"), "fake_mode")
    }
    before = mode.allow_non_fake_inputs
    assert_no_cpu_fallback(graph)
    assert mode.allow_non_fake_inputs == before


def test_a_graph_without_examples_is_refused() -> None:
    with pytest.raises(AssertionError, match="example_value"):
        aten_ops(torch.fx.symbolic_trace(lambda x: x.relu()))


WHEEL = {
    "torch_npu/version.py": "__version__ = '9.8.7'\n",
    "torch_npu/npu/__init__.py": "__all__ = ['graph', 'mem_get_info', 'Stream']\n\ndef "
    "mem_get_info(device=None):\n    ...\n",
    "torch_npu/npu/graphs.py": (
        "class graph:\n    def __init__(self, npu_graph, pool=None, mode: str = 'global'): ...\n   "
        " def _hidden(self): ...\n"
        "    def end(self, *, hard: bool = True): ...\n\ndef private(): ...\n"
    ),
    "torch_npu/npu/npugraph.py": "class NPUGraph:\n    def __init__(self):\n        "
    "self.graph_dispatch_mode = object()\n",
    "torch_npu/npu/_npugraph_handlers/handlers.py": (
        "class Handler:\n    UPDATE_SPECS = {\n        '_npu_paged_attention': [('arg', 7, "
        "'context_lens')],\n"
        "        '_npu_paged_attention.default': [('arg', 7, 'context_lens')],\n        "
        "'other.default': [('arg', 1, 'lens')],\n    }\n"
    ),
    "torch_npu/npu/streams.py": "class Stream:\n    def __new__(cls, device=None, **kwargs): ...\n",
    "torch_npu/dynamo/torchair/npu_fx_compiler.py": "def get_npu_backend(*, compiler_config: int = "
    "None): ...\n",
    "torch_npu/dynamo/torchair/configs/compiler_config.py": "class CompilerConfig:\n    def "
    "__init__(self): ...\n",
}


def test_extract_reads_a_wheel(tmp_path: Path) -> None:
    for name, text in WHEEL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    native = set(extract.aten_ops()) - {
        "aten::lgamma.out",
        "aten::lgamma",
        "aten::index.Tensor_out",
        "aten::nonzero_static",
    }
    dump = {"ops": dict.fromkeys(extract.OPS, "schema"), "native": sorted(native)}
    found = extract.extract(tmp_path, dump)
    assert found["torch_npu"] == "9.8.7" and found["ops"] == dump["ops"]
    assert found["python"] == {
        "torch.npu.Stream": "(device=None, **kwargs)",
        "torch.npu.graph": "(npu_graph, pool=None, mode='global')",
        "torch.npu.graph.end": "(*, hard=True)",
        "torch.npu.mem_get_info": "(device=None)",
        **extract.COMPILED,
        "torchair.configs.compiler_config.CompilerConfig": "()",
        "torchair.get_npu_backend": "(*, compiler_config=None)",
    }
    assert found["attributes"] == {"torch.npu.NPUGraph": ["graph_dispatch_mode"]}
    assert found["updates"] == {"_npu_paged_attention.default": ["context_lens"]}
    assert found["native_over_fallback"] == ["aten::index.Tensor", "aten::lgamma_"]
    assert {
        "aten::lgamma",
        "aten::lgamma.out",
        "aten::index.Tensor_out",
        "aten::nonzero_static",
    } <= set(found["cpu_fallback"])


def test_the_committed_extract_is_small_and_whole() -> None:
    assert npu_contract.EXTRACT.stat().st_size < 32_000
    assert set(npu_contract.contract()["ops"]) == set(extract.OPS)
    assert len(npu_contract.contract()["cpu_fallback"]) > 391


def test_a_dump_holds_the_ops_of_this_process() -> None:
    library = torch.library.Library("npu", "FRAGMENT")
    library.define("extract_test(Tensor input, int dim=-1) -> Tensor")
    dump = extract.dump_dispatcher()
    assert (
        dump["ops"]["npu::extract_test"] == "npu::extract_test(Tensor input, int dim=-1) -> Tensor"
    )
    assert dump["native"] == [], "no npu here"
