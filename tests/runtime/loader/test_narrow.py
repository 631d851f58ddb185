"""Which rows and columns each rank gets: of all ranks together exactly the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import Kind, write_gguf
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import make_tiny_model

from piecework.runtime.files.gguf_reader import open_gguf
from piecework.runtime.layers.linear import (
    Axis,
    CannotSplitError,
    Place,
    StoredTensor,
    Stretch,
)
from piecework.runtime.loader import gguf, safetensors
from piecework.runtime.loader.loader import empty_model, random_model
from piecework.runtime.loader.narrow import whole_place
from piecework.runtime.loader.parallel import Shard, vocabulary_rows
from piecework.runtime.models.llama import LlamaConfig
from tests.split_models import load

CPU = torch.device("cpu")
STATUS = Path("/proc/self/status")


def config_of(heads: int, kv_heads: int, **others: int) -> LlamaConfig:
    sizes = {"vocab_size": 500, "hidden_size": 8, "num_layers": 1, "head_dim": 2} | others
    return LlamaConfig(
        architecture="LlamaForCausalLM",
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=5040,
        norm_eps=1e-5,
        max_position_embeddings=8,
        rope_theta=1e4,
        **sizes,
    )


@settings(deadline=None, max_examples=50)
@given(kv_heads=st.integers(1, 12), times=st.integers(1, 6), size=st.integers(2, 8))
def test_every_head_is_some_ranks_with_its_keys_and_values(
    kv_heads: int, times: int, size: int
) -> None:
    config = config_of(kv_heads * times, kv_heads)
    layers = []
    for shard in (Shard(rank, size) for rank in range(size)):
        try:
            model = empty_model(config, torch.float32, torch.device("meta"), shard=shard)
        except CannotSplitError:
            assume(False)
        layers.append(model.model.layers[0].self_attn)
    seen: list[int] = []
    for layer in layers:
        assert (layer.num_heads, layer.num_kv_heads) == (
            layers[0].num_heads,
            layers[0].num_kv_heads,
        )
        rows, columns = layer.qkv_proj.held_rows, layer.o_proj.held_columns
        assert columns == rows["q_proj"] and rows["k_proj"] == rows["v_proj"]
        first, count, of = (number // 2 for number in rows["q_proj"])
        first_kv, _, of_kv = (number // 2 for number in rows["k_proj"])
        assert (of, of_kv) == (config.num_heads, kv_heads)
        heads = range(first, min(first + count, of))
        assert heads, "a rank without a head"
        # A query finds its keys where grouped-query attention looks for them.
        group = layer.num_heads // layer.num_kv_heads
        assert all(head // times == first_kv + (head - first) // group for head in heads)
        seen += heads
    assert seen == list(range(config.num_heads))


@given(vocab=st.integers(1, 10**6), size=st.integers(1, 16))
def test_every_token_is_one_ranks(vocab: int, size: int) -> None:
    rows = [vocabulary_rows(vocab, Shard(rank, size)) for rank in range(size)]
    assert len({each.size for each in rows}) == 1
    assert [each.begin for each in rows] == [rank * rows[0].size for rank in range(size)]
    assert vocab <= sum(each.size for each in rows) < vocab + 64 * size


@given(
    entries=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    unit=st.integers(1, 5),
    missing=st.integers(0, 3),
    columns=st.integers(1, 3),
    transposed=st.booleans(),
)
def test_parts_of_a_tensor_are_all_of_it(
    entries: list[int], unit: int, missing: int, columns: int, transposed: bool
) -> None:
    """What lies behind the last entry is zeros."""
    size = sum(entries) - min(missing, sum(entries) - 1)
    values = 1 + torch.arange(size * columns).view(size, columns)
    values = values.T.contiguous() if transposed else values
    stored = StoredTensor(Path("f"), "t", tuple(values.shape), lambda to: to.copy_(values))
    found: list[torch.Tensor] = []
    begin = 0
    for count in entries:
        shape = (columns, count) if transposed else (count, columns)
        place = Place(
            [shape], lambda tensor: found.append(tensor.read()), rows=Axis(int(transposed), unit)
        )
        whole = whole_place(place, Stretch(begin * unit, count * unit, size * unit), None)
        assert whole.shapes == [tuple(values.shape)]
        whole.load(stored)
        begin += count
    together = torch.cat(found, int(transposed))
    together = together.T if transposed else together
    assert torch.equal(together[:size], (values.T if transposed else values).float())
    assert not together[size:].any()


def test_what_several_rows_share_is_not_cut() -> None:
    place = Place([(1,)], lambda tensor: None, rows=Axis(0, 128))
    with pytest.raises(
        CannotSplitError, match=r"192 of 384 rows for each rank would cut a block of 128"
    ):
        whole_place(place, Stretch(0, 192, 384), None)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_1])
def test_a_rank_reads_its_own_rows_and_columns_of_gguf(kind: Kind, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "source", intermediate_size=128)
    held = write_gguf(folder, tmp_path / "model.gguf", "llama", kind)
    for rank in range(2):
        (layer, *_) = load(tmp_path / "model.gguf", Shard(rank, 2)).model.layers
        for name, linear, part in (
            ("self_attn.q_proj", layer.self_attn.qkv_proj, "q_proj"),
            ("self_attn.o_proj", layer.self_attn.o_proj, ""),
            ("mlp.down_proj", layer.mlp.down_proj, ""),
        ):
            dim = 1 if linear.held_columns else 0
            expected = held[f"model.layers.0.{name}.weight"].chunk(2, dim)[rank]
            assert torch.equal(linear.weight[linear.rows(part)], expected), name


@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_any_part_of_a_stored_tensor_is_that_of_the_whole(stored: Any, data: st.DataObject) -> None:
    """Columns may begin and end inside of a block; rows of queries are cut between heads."""
    tensor = data.draw(st.sampled_from(stored))
    unit = 16 if tensor.name.endswith(("q_proj.weight", "k_proj.weight")) else 1
    index = []
    for size in (tensor.shape[0] // unit, *tensor.shape[1:]):
        begin = data.draw(st.integers(0, size - 1))
        index.append(slice(begin, data.draw(st.integers(begin + 1, size))))
    index[0] = slice(index[0].start * unit, index[0].stop * unit)
    assert torch.equal(tensor.part(tuple(index)).read(), tensor.read()[tuple(index)])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> list[StoredTensor]:
    """A folder's tensors, and those of .gguf files of several kinds."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    found = safetensors.list_tensors(folder, quantized=False)
    for kind in (Kind.F16, Kind.Q5_0, Kind.Q4_1):
        path = folder / f"{kind.name}.gguf"
        write_gguf(folder, path, "llama", kind)
        found += gguf.list_tensors(open_gguf(path), LlamaConfig.from_pretrained(folder))
    return found


@pytest.mark.skipif(not STATUS.exists(), reason="the system does not tell what is mapped")
def test_rows_of_other_ranks_are_not_read(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2**12, 2**11)}, tmp_path / "model.safetensors")
    (tensor,) = safetensors.list_tensors(tmp_path, quantized=False)
    before = mapped()
    tensor.part((slice(0, 2**8), slice(0, 2**11))).read()
    assert mapped() - before < 2**23 < 2**25 == 2**12 * 2**11 * 4


def mapped() -> int:
    """Bytes of files that lie in this process's memory."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_random_weights_are_parts_of_the_same_model(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tie_word_embeddings=True)
    whole = random_model(str(folder), torch.float32, CPU).model.layers[1]
    for rank in range(2):
        layer = random_model(str(folder), torch.float32, CPU, shard=Shard(rank, 2)).model.layers[1]
        assert torch.equal(layer.mlp.down_proj.weight, whole.mlp.down_proj.weight.chunk(2, 1)[rank])
        rows = layer.self_attn.qkv_proj.rows("v_proj"), whole.self_attn.qkv_proj.rows("v_proj")
        own, all_rows = (
            each.self_attn.qkv_proj.weight[of]
            for each, of in zip((layer, whole), rows, strict=True)
        )
        assert torch.equal(own, all_rows.chunk(2)[rank])
