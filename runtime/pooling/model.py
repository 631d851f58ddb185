"""A loaded pooling model, which runs batches of texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ...compilation.piece_store import weight_bytes
from ...kernels.attention import AttentionMetadata
from ...kernels.platform.detect import detect
from ...kernels.platform.platform import Platform
from ...kernels.varlen_attention import VarlenAttention, equal_runs
from ..cache.pool import KVPool
from ..config.encoder import EncoderConfig
from ..core.forward_context import PagedAttention
from ..core.pooling_messages import NO_ADAPTER, PoolingInfo
from ..files.resolve import find_model
from ..layers.attention import register_attention
from .config import PoolingConfig
from .folder import PoolingFolder, read_folder
from .loading import load_dense, load_transformer, read_transformer_config, stored_dtype
from .packing import pack_numbers
from .pooler import ACTIVATIONS, pool

_REQUESTS = 64
Vectors = np.ndarray[Any, np.dtype[np.float32]]


class PoolInput(NamedTuple):
    """One text, or a pair whose first text has `first` tokens.

    `adapter` is the number of the task whose adapter the model adds, if it has adapters.
    """

    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    first: int
    adapter: int = NO_ADAPTER


class PoolingModel:
    """Maps texts to vectors, or to the numbers of a classifier.

    Raises `ValueError` with a remedy.

        model = PoolingModel(PoolingConfig(model_path="all-MiniLM-L6-v2"))
        vectors = model.run([PoolInput(np.array([101, 7592, 102], np.int32), 3)])
    """

    def __init__(self, config: PoolingConfig) -> None:
        self.config = config
        self.folder: PoolingFolder = read_folder(find_model(config.model_path))
        model_config = read_transformer_config(self.folder)
        self.context_length = longest_text(self.folder, model_config, config.context_length)
        self.vocab_size = model_config.vocab_size
        self.platform: Platform = detect(config.device)
        self.platform.set_up(config.num_threads)
        register_attention(self.platform.dispatch_key)
        self.device = self.platform.device()
        self.dtype: torch.dtype = (
            self._stored_dtype() if config.dtype == "auto" else getattr(torch, config.dtype)
        )
        began = time.perf_counter()
        # The attention backend decides which kernels multiply by packed weights.
        backend = self.platform.attention_backend()
        kernels = self.platform.linear_kernels(self.dtype, backend)
        place = self.dtype, self.device, kernels
        self.transformer = load_transformer(self.folder, model_config, *place)
        self.denses = [load_dense(dense, *place) for dense in self.folder.denses]
        self._weight_bytes = sum(map(weight_bytes, (self.transformer, *self.denses)))
        for part in (self.transformer, *self.denses):
            pack_numbers(part, self.platform)
        layouts = self.transformer.kv_layouts(self.dtype)
        # Attention needs a cache, so there is one page. Nothing is kept in it.
        cache = KVPool(layouts, num_pages=1, page_size=1, platform=self.platform)
        self._attention = PagedAttention(backend=VarlenAttention(), pool=cache)
        self._nothing = torch.empty(0, dtype=torch.int64)
        self._modes: Sequence[str] = (
            (self.transformer.classifier_pooling,)
            if self.folder.is_classifier
            else self.folder.modes
        )
        shortest = np.zeros(2, np.int32)
        self.size = self.run([PoolInput(shortest, 2)]).shape[1]
        self.platform.give_back_memory()
        self.load_seconds = time.perf_counter() - began

    def run(self, inputs: Sequence[PoolInput]) -> Vectors:
        """Return [inputs, size], in order. Inputs with the same adapter are one batch."""
        order = sorted(range(len(inputs)), key=lambda index: inputs[index].adapter)
        groups = groupby((inputs[index] for index in order), key=lambda each: each.adapter)
        parts = [self._run_alike(list(own), adapter) for adapter, own in groups]
        found: Vectors = np.concatenate(parts)[np.argsort(order)]
        return found

    def _run_alike(self, inputs: Sequence[PoolInput], adapter: int) -> Vectors:
        """Run inputs with the same adapter, without padding."""
        if (task := getattr(self.transformer, "task", None)) is not None:
            task.number = None if adapter == NO_ADAPTER else adapter
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index].token_ids))
        lengths = [len(inputs[index].token_ids) for index in order]
        runs = equal_runs(lengths)
        ids = np.concatenate([inputs[index].token_ids for index in order])
        positions = np.concatenate([np.arange(length) for length in lengths])
        firsts = np.repeat([inputs[index].first for index in order], lengths)
        tensors = [
            torch.from_numpy(each.astype(np.int64)).to(self.device)
            for each in (ids, positions, positions >= firsts)
        ]
        metadata = AttentionMetadata(
            query_lens=lengths,
            seq_lens=lengths,
            block_table=self._nothing,
            slot_mapping=self._nothing,
        )
        with torch.inference_mode(), self._attention.step(metadata):
            vectors = pool(self.transformer(*tensors), runs, self._modes)
            if self.folder.is_classifier:
                logits = self.transformer.classify(vectors)
                result = ACTIVATIONS[self.folder.activation](logits.float())
            else:
                for dense in self.denses:
                    vectors = dense(vectors)
                result = vectors.float()
                if self.folder.normalizes:
                    result = F.normalize(result, dim=-1)
            found = result.cpu().numpy()
        back = np.empty_like(found)
        back[order] = found
        return back

    def _stored_dtype(self) -> torch.dtype:
        stored = stored_dtype(self.folder)
        return torch.float32 if stored in self.platform.slow_dtypes else stored

    @property
    def token_budget(self) -> int:
        """Most tokens of a batch, unless one text is longer."""
        return self.config.chunked_prefill_size or self.platform.default_chunked_prefill_size

    def info(self) -> PoolingInfo:
        steps = [dense.activation for dense in self.folder.denses]
        return PoolingInfo(
            model_path=self.config.model_path,
            architecture=self.folder.architecture,
            task="classify" if self.folder.is_classifier else "embed",
            dtype=str(self.dtype).removeprefix("torch."),
            device=self.platform.device_type,
            pooling=", ".join(
                [
                    "+".join(self._modes),
                    *(f"dense {name}" for name in steps),
                    *(["normalised"] if self.folder.normalizes else []),
                    *([self.folder.activation.lower()] if self.folder.is_classifier else []),
                ]
            ),
            size=self.size,
            labels=list(self.folder.labels),
            normalizes=self.folder.normalizes,
            context_length=self.context_length,
            vocab_size=self.vocab_size,
            token_budget=self.token_budget,
            max_running_requests=self.config.max_running_requests or _REQUESTS,
            weight_bytes=self._weight_bytes,
            load_seconds=self.load_seconds,
            remarks=self.platform.remarks(),
        )


def longest_text(folder: PoolingFolder, config: Any, asked: int | None) -> int:
    """Return the longest text in tokens. Raises `ValueError` if more is requested than the model
    has positions for.
    """
    most: int = (
        config.max_length if isinstance(config, EncoderConfig) else config.max_position_embeddings
    )
    if asked is not None and asked > most:
        raise ValueError(f"--context-length {asked} is more than the model's {most}")
    return asked or min(most, folder.max_length or most)
