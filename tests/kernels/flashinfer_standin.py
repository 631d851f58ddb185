"""flashinfer's three paged wrappers in plain torch, as strict as it and checked against its own
signatures at every call.

What a real call reads on the device is read from tensors here too, so a recorded call shows what
was planned for it last.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from piecework.kernels import cache_format
from piecework.kernels.attention import KVLayout

EXTRACT = json.loads(
    (Path(__file__).parents[1] / "library_contracts" / "flashinfer.json").read_text()
)
_GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""Queries a key that decodes off tensor cores are compiled for: DISPATCH_GQA_GROUP_SIZE in
flashinfer's utils.cuh.
"""

_LIBRARY = torch.library.Library("flashinfer_standin", "DEF")
_LIBRARY.define(
    "attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor query_indptr, Tensor indptr, Tensor "
    "indices, Tensor last_page_len, "
    "Tensor planned, Tensor(a!) out, float scale, int window_left) -> ()"
)


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    layout: KVLayout,
) -> None:
    """What Triton's kernel does on a GPU: keys and values to their slots of the cache."""
    if layout.cache_dtype is not None:
        cache_format.store(k, k_cache, slots, layout.k_scale)
        cache_format.store(v, v_cache, slots, layout.v_scale)
        return
    k_cache.flatten(0, 1).index_copy_(0, slots, k)
    v_cache.flatten(0, 1).index_copy_(0, slots, v)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_indptr: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    planned: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_left: int,
) -> None:
    page_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    assert torch.equal(planned, indptr), (
        "the call was planned for other pages than its buffers hold"
    )
    for number, last in enumerate(last_page_len.tolist()):
        pages = indices[indptr[number] : indptr[number + 1]].long()
        length = (len(pages) - 1) * page_size + last
        keys, values = (
            cache[pages]
            .to(q.dtype)
            .flatten(0, 1)[:length]
            .repeat_interleave(group, 1)
            .transpose(0, 1)
            for cache in (k_cache, v_cache)
        )
        rows = slice(int(query_indptr[number]), int(query_indptr[number + 1]))
        position = torch.arange(length - (rows.stop - rows.start), length)[:, None]
        distance = position - torch.arange(length)
        hidden = (distance < 0) | (
            (distance > window_left)
            if window_left >= 0
            else torch.zeros_like(distance, dtype=torch.bool)
        )
        scores = (q[rows].transpose(0, 1) @ keys.transpose(1, 2) * scale).masked_fill(
            hidden, float("-inf")
        )
        out[rows] = (scores.softmax(-1) @ values).transpose(0, 1)


_LIBRARY.impl("attend", _attend, "CPU")


class _Checked:
    """`called`: "Class.method" of every call so far, by any instance."""

    called: ClassVar[set[str]] = set()
    module: ClassVar[str] = ""

    @classmethod
    def _check(cls, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments by name, as flashinfer's own signature binds them."""
        name = f"{cls.module}{cls.__name__}.{method}"
        _Checked.called.add(name)
        # The decode's plan hands everything on to another method, which takes the keywords.
        text = EXTRACT["signatures"].get(
            name.replace(".plan", "._plan_impl"), EXTRACT["signatures"].get(name)
        )
        bound = inspect.signature(eval(f"lambda {text}: None")).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _check_plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
    ) -> None:
        assert _get_current_dispatch_mode() is None, "planned while a graph is recorded"
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert indptr.device.type == last_page_len.device.type == "cpu", (
            "a plan from the device waits for it"
        )
        assert len(indptr) == len(last_page_len) + 1 and int(indptr[-1]) == len(indices)
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())

    def _attend(
        self,
        given: dict[str, Any],
        query_indptr: torch.Tensor,
        buffers: tuple[torch.Tensor, ...],
        planned: torch.Tensor,
    ) -> None:
        q, (k_cache, v_cache), out, plan = (
            given["q"],
            given["paged_kv_cache"],
            given["out"],
            self._plan,
        )  # type: ignore[attr-defined]
        assert (
            q.dtype == plan["q_data_type"]
            and k_cache.dtype == v_cache.dtype == plan["kv_data_type"]
            and out.dtype == q.dtype
        )
        assert k_cache.stride() == v_cache.stride() and k_cache.shape[1] == plan["page_size"]
        assert (q.shape[1], k_cache.shape[2]) == (
            plan["num_qo_heads"],
            plan["num_kv_heads"],
        ) and out.shape == q.shape
        torch.ops.flashinfer_standin.attend(
            q, k_cache, v_cache, query_indptr, *buffers, planned, out,
            plan["sm_scale"] * (given["k_scale"] or 1.0), plan["window_left"]
        )  # fmt: skip
        if given["v_scale"] is not None:
            out *= given["v_scale"]


class BatchPrefillWithPagedKVCacheWrapper(_Checked):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._check("__init__", *args, **kwargs)
        assert given["float_workspace_buffer"].dtype == torch.uint8 and given["kv_layout"] == "NHD"

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._plan = given = self._check("plan", *args, **kwargs)
        self._buffers = tuple(
            given[f"paged_kv_{name}"].clone() for name in ("indptr", "indices", "last_page_len")
        )
        self._check_plan(*self._buffers, given["page_size"])
        assert given["causal"]

    def run(self, *args: Any, **kwargs: Any) -> None:
        given = self._check("run", *args, **kwargs)
        assert given["q"].shape[0] == int(self._plan["qo_indptr"][-1])
        self._attend(given, self._plan["qo_indptr"], self._buffers, self._buffers[0])


class BatchDecodeWithPagedKVCacheWrapper(_Checked):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._given = given = self._check("__init__", *args, **kwargs)
        assert given["float_workspace_buffer"].dtype == torch.uint8 and given["kv_layout"] == "NHD"
        assert given["backend"] == "fa2", "eager and recorded steps may choose different kernels"
        self._buffers = tuple(
            given[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")
        )
        if given["use_cuda_graph"]:
            assert (
                all(torch.is_tensor(buffer) for buffer in self._buffers)
                and len(self._buffers[0]) == len(self._buffers[2]) + 1
            )
            self._planned = torch.empty_like(self._buffers[0])

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._plan = given = self._check("plan", *args, **kwargs)
        fresh = tuple(given[name] for name in ("indptr", "indices", "last_page_len"))
        self._check_plan(*fresh, given["page_size"])
        if not self._given["use_tensor_cores"]:
            assert given["num_qo_heads"] // given["num_kv_heads"] in _GROUPS
        if not self._given["use_cuda_graph"]:
            self._buffers, self._planned = tuple(tensor.clone() for tensor in fresh), fresh[0]
            return
        assert len(fresh[2]) == len(self._buffers[2]), (
            "the batch size of a recorded wrapper is fixed"
        )
        assert len(fresh[1]) <= len(self._buffers[1])
        for buffer, tensor in zip(self._buffers, fresh, strict=True):
            buffer[: len(tensor)].copy_(tensor)
        self._planned.copy_(fresh[0])

    def run(self, *args: Any, **kwargs: Any) -> None:
        given = self._check("run", *args, **kwargs)
        batch = len(self._buffers[2])
        assert given["q"].shape[0] == batch
        self._attend(given, torch.arange(batch + 1), self._buffers, self._planned)


class _MLAPlanMetadata(_Checked):
    module = "mla."

    @classmethod
    def csr(cls, *args: Any, **kwargs: Any) -> _MLAPlanMetadata:
        made = cls()
        made.given = cls._check("csr", *args, **kwargs)  # type: ignore[attr-defined]
        return made


class _BatchMLAPagedAttentionWrapper(_Checked):
    """The kernels fa2 and fa3, which alone plan a recorded wrapper again. What they refuse is
    in `_fa_common.py` of flashinfer's folder `mla`.
    """

    module = "mla."

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._given = given = self._check("__init__", *args, **kwargs)
        assert given["float_workspace_buffer"].dtype == torch.uint8
        assert given["backend"] in ("fa2", "fa3")
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        self._buffers = [given[name] for name in names]
        if given["use_cuda_graph"]:
            assert all(torch.is_tensor(each) and each.is_contiguous() for each in self._buffers)
            assert len({each.data_ptr() for each in self._buffers}) == len(names), "overlap"
            self._planned = torch.empty_like(self._buffers[1])

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._plan = given = self._check("plan", *args, **kwargs)
        assert _get_current_dispatch_mode() is None, "planned while a graph is recorded"
        fresh = list(given["metadata"].given.values())
        queries, indptr, indices, lengths = fresh
        assert all(each.dtype == torch.int32 for each in fresh)
        assert all(each.device.type == "cpu" for each in (queries, indptr, lengths)), (
            "a plan from the device waits for it"
        )
        assert len(queries) == len(indptr) == len(lengths) + 1 and int(indptr[-1]) == len(indices)
        assert given["q_data_type"] == given["kv_data_type"]
        heads, news = given["num_heads"], queries.diff().tolist()
        assert given["causal"] or max(news) == 1, "queries of a request would see all of it"
        tile = 128 if sum(news) * heads // len(news) > 64 else 64
        if given["causal"] and tile % heads:
            for new, length in zip(news, lengths.tolist(), strict=True):
                for end in range(tile, new * heads, tile):
                    query, rest = divmod(end, heads)
                    assert not rest or (length - new + query) % 16, "a key would be lost"
        if not self._given["use_cuda_graph"]:
            self._buffers, self._planned = [each.clone() for each in fresh], indptr
            return
        for buffer, tensor in zip(self._buffers, fresh, strict=True):
            assert len(tensor) == len(buffer) or (tensor is indices and len(tensor) < len(buffer))
            buffer[: len(tensor)].copy_(tensor)
        self._planned.copy_(indptr)

    def run(self, *args: Any, **kwargs: Any) -> None:
        given, plan = self._check("run", *args, **kwargs), self._plan
        q, cache, out = given["query"], given["kv_cache"], given["out"]
        latent, turned = plan["head_dim_ckv"], plan["head_dim_kpe"]
        assert q.shape == (len(q), plan["num_heads"], latent + turned)
        assert cache.shape[1:] == (plan["page_size"], latent + turned)
        assert out.shape == (len(q), plan["num_heads"], latent)
        assert q.dtype == plan["q_data_type"] == cache.dtype == out.dtype
        assert all(given[name] is None for name in ("q_nope", "ckv_cache", "ckv_scale"))
        queries, indptr, indices, lengths = self._buffers
        last = lengths - (indptr.diff() - 1) * plan["page_size"]
        if not self._given["use_cuda_graph"]:
            assert len(q) == int(queries[-1])
        torch.ops.flashinfer_standin.attend(
            q, cache[:, :, None], cache[:, :, None, :latent], queries, indptr, indices, last,
            self._planned, out, plan["sm_scale"], -1,
        )  # fmt: skip


class mla:
    """As the module of this name."""

    MLAPlanMetadata = _MLAPlanMetadata
    BatchMLAPagedAttentionWrapper = _BatchMLAPagedAttentionWrapper


_MLAPlanMetadata.__name__ = "MLAPlanMetadata"
_BatchMLAPagedAttentionWrapper.__name__ = "BatchMLAPagedAttentionWrapper"
