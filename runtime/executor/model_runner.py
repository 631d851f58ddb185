"""One rank: loads the model, sizes the KV cache, and runs the forward of a step."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...compilation.passes.config import PassConfig
from ...compilation.piece_store import weight_bytes
from ...kernels.attention import AttentionBackend
from ...kernels.chunked_attention import with_chunks
from ...kernels.collectives import TENSOR_PARALLEL, Group, get_group
from ...kernels.linear import LinearKernels
from ...kernels.platform.detect import detect
from ...kernels.platform.device import Place
from ...kernels.platform.platform import Platform
from ..cache.pool import KVPool, in_cache_dtype, is_windowed, page_bytes, shared_pages, window_of
from ..cache.states import StatePool, slot_bytes
from ..config.engine import EngineConfig
from ..config.resolve import LEAST_PAGES, WindowPages, resolve_cache, resolve_steps, with_states
from ..config.resolved import ResolvedConfig
from ..core.batch import Batch, Layout
from ..core.engine_info import EngineInfo, RankInfo
from ..core.forward_context import PagedAttention
from ..core.request import Scheduled
from ..distributed.ranks import ALONE, Ranks
from ..files.resolve import resolve_model_path
from ..graphs.graph_runner import GraphCounts, GraphRunner
from ..graphs.pieces import most_rows, seen_lengths
from ..layers.images import register_ops
from ..loader.check import check_engine
from ..loader.draft_heads import Placement, load_head
from ..loader.loader import load_model, random_model
from ..loader.parallel import Shard
from ..lora.build import make_adapters
from ..lora.store import AdapterStore
from ..models.causal_lm import CausalLM
from ..multimodal.build import make_encodings
from ..quantization.methods import describe, linear_kinds
from .cache_remarks import cache_remarks
from .first_start import starts_without_kernels
from .memory_profile import profile_memory
from .runner import Listener
from .start_clock import StartClock
from .step import PendingStep
from .warm_up import warm_up

logger = logging.getLogger(__name__)

_KEEP_SECONDS = 60.0  # Seconds between two writes of the lengths of steps.


class ModelRunner:
    """A loaded model with its KV cache.

    `config` holds every setting of the engine. Raises `ValueError` for what the user can change.

    Attributes:
        adapters: The adapters (LoRA), or None if they are off.
        images: The encoder of images, or None if the model takes none.
        head: Drafts tokens from the model's hidden states. Its keys and values are in the pages of
            the model's.
        listener: Gets the hidden states of each step.
    """

    listener: Listener | None = None

    def __init__(
        self, config: EngineConfig, *, progress: bool = True, ranks: Ranks = ALONE
    ) -> None:
        self.ranks = ranks
        self.clock = StartClock()
        self.platform: Platform = detect(config.device)
        self.shard = Shard(ranks.rank, ranks.size, self.platform.cuts_head_groups, config.ep_size)
        self._replicas = config.replicas
        self._take_place(config)
        self.platform.check_kv_cache_dtype(config.kv_cache_dtype)
        register_ops(self.platform.dispatch_key)
        self.platform.begin_trials()
        self.device = self.platform.device()
        self.dtype: torch.dtype = (
            self.platform.default_dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        )
        self.model_path = path = resolve_model_path(config.model_path)
        check_engine(path, config)
        with self.clock.phase("kernels"):
            self._awaits_kernels = starts_without_kernels(config, path, self.platform, ranks)
        if self._awaits_kernels:
            config = replace(config, disable_cuda_graph=True)
        with self.clock.phase("kernels"):
            kernels = self.platform.linear_kernels(
                self.dtype,
                self.platform.attention_backend(config.attention_backend),
                config.cpu_activations,
            )
        with self.clock.phase("weights"):
            self.images = make_encodings(path, config, self.platform, self.dtype, kernels)
            self.model = self._load(path, config, kernels, progress=progress)
            how = Placement(self.dtype, self.device, kernels, self.platform.lacking_dtypes)
            self.head = load_head(path, config, self.model, how, progress=progress)
            self.platform.give_back_memory()
            self.adapters = self._make_adapters(config)
        parts = self.model, self.head, None if self.images is None else self.images.tower
        self._loaded = nn.ModuleList(each for each in parts if each is not None)
        self.model_config, self.linear_kinds = self.model.config, linear_kinds(self.model)
        of_head = [] if self.head is None else self.head.kv_layouts(self.dtype)
        layouts = [*self.model.kv_layouts(self.dtype), *of_head]
        scales = [*self.model.kv_scales, *[(1.0, 1.0)] * len(of_head)]
        self._layouts = in_cache_dtype(layouts, config.kv_cache_dtype, scales)
        self._state_layouts = self.model.state_layouts(self.dtype)
        # A trial may end differently on another rank, so rank 0 decides.
        chosen = self.platform.choose_attention(config.attention_backend, self._layouts)
        self.attention_backend = ranks.broadcast_object(chosen)
        made = self.platform.make_attention_backend(self.attention_backend)
        backend = with_chunks(made, self._layouts)
        self.seen_lengths = seen_lengths(self.model_config, self.dtype)
        # The chosen sizes depend on these counts. From here on every rank counts the same steps.
        self.seen_lengths.counts = Counter(ranks.broadcast_object(self.seen_lengths.counts))
        self.vocab_size, self.group = self.model_config.vocab_size, self._meet()
        with self.clock.phase("memory"):
            self.config = self._resolve(config, backend)
        self.pool = self._make_pool(self.config)
        self.states = self._make_states(self.config.state_slots)
        attention = PagedAttention(backend=backend, pool=self.pool, states=self.states)
        self.attention = attention
        form = self.pool.page_size, self.device, self.platform.slot_dtype
        of_images = None if self.images is None else self.images.of_step
        self.layout = Layout(*form, only_windows=self.pool.only_windows, images=of_images)
        self._kv_bytes = self.pool.num_bytes + (self.states.num_bytes if self.states else 0)
        own = RankInfo(weight_bytes=weight_bytes(self._loaded), kv_bytes=self._kv_bytes)
        self._rank_infos = ranks.gather_objects(own) or []
        if self.platform.compiles_kernels:
            with self.clock.phase("first steps"):
                warm_up(self.model, attention, self.platform, longest=self.config.context_length)
        self.platform.end_trials()
        # After the first steps, because they show which kernels this machine uses.
        self._remarks = {
            **self.platform.remarks(self._layouts),
            **self.model.remarks(),
            **cache_remarks(self._windows, self.config, self.pool, self.states),
        }
        self._gives_results = self.states is None and self.head is None
        self.graphs = GraphRunner(
            *(self.model, self.platform, self.config, attention, self.seen_lengths, ranks),
            None if self.adapters is None else self.adapters.slots.step,
        )
        self.eos_token_ids = frozenset(self.model_config.eos_token_ids)

    def execute(self, scheduled: list[Scheduled], previous: PendingStep | None) -> PendingStep:
        """Launch a step. It takes its first tokens from `previous`, the step in flight."""
        return PendingStep(self, scheduled, previous)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states [T, hidden] of a step. Write its keys, values and states."""
        if self.states is not None:
            self.states.copy(batch.state_copies)
        hidden = self.graphs(batch)
        if self.states is not None:
            self.states.copy(batch.snapshots)
        if self.listener is not None:
            self.listener.observe(batch.scheduled, hidden)
            hidden = hidden[:, : self.model_config.hidden_size].contiguous()
        return hidden

    def choose(self, batch: Batch) -> list[int] | None:
        """Compute a step and choose its tokens [N] in one native call.

        Return None, and compute nothing, if the step cannot be computed that way.
        """
        return self.graphs.choose(batch) if self._gives_results else None

    def forward_to_logits(self, batch: Batch) -> torch.Tensor | None:
        """Compute a step and its logits [N, V] float32 in one native call, or return None."""
        return self.graphs.logits(batch) if self._gives_results else None

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return logits [N, V] float32 of hidden [N, hidden] on rank 0, and None on other ranks."""
        logits: torch.Tensor = self.model.compute_logits(hidden)
        if self.group is None:
            return logits
        parts = self.group.gather(logits)
        if parts is None:
            return None
        return self._side_by_side(parts)

    def compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] float32 of this rank's rows of hidden [N, hidden].

        Every rank has R = ceil(N / ranks) rows. Rows after the last one of N are undefined.
        """
        assert self.group is not None
        logits: torch.Tensor = self.model.compute_logits(hidden)
        if missing := -len(logits) % self.ranks.size:
            logits = F.pad(logits, (0, 0, 0, missing))
        return self._side_by_side(self.group.all_to_all(logits))

    def _side_by_side(self, parts: torch.Tensor) -> torch.Tensor:
        """Join the parts of the vocabulary, in the order of ranks, for the same rows."""
        *others, last = parts.chunk(self.ranks.size)
        # The last part may be padded.
        missing = self.vocab_size - len(others) * last.shape[1]
        return torch.cat([*others, last[:, :missing]], dim=1)

    def graph_counts(self) -> GraphCounts:
        """Count graph replays, padding and fallbacks of all steps so far."""
        return self.graphs.counts()

    def synchronize(self) -> None:
        """Wait for the device. Raise if the device is broken."""
        self.platform.synchronize()

    def rest(self) -> None:
        """Forget the last step and save the lengths of steps. Called when the engine is idle."""
        self.layout.forget()
        self.close(unless_within=_KEEP_SECONDS)

    def give_back_memory(self) -> None:
        """Free the memory of the last step on all ranks. Called when the engine stays idle."""
        self.ranks.call("give_back_memory")
        self.layout.forget()
        self.platform.give_back_memory()

    def close(self, *, unless_within: float = 0.0) -> None:
        """Save the lengths of steps for the next start, unless saved in the last seconds."""
        if self.ranks.rank != 0:
            return
        try:
            self.seen_lengths.save_if_older_than(unless_within)
        except OSError as error:
            logger.warning("the lengths of steps are not kept for the next start: %s", error)

    def info(self) -> EngineInfo:
        config = self.config
        return EngineInfo(
            model_path=config.model_path,
            architecture=self.model_config.architecture,
            dtype=str(self.dtype).removeprefix("torch."),
            device=self.platform.device_type,
            attention_backend=self.attention_backend,
            vocab_size=self.vocab_size,
            context_length=config.context_length,
            kv_tokens=config.max_total_tokens,
            page_size=self.pool.page_size,
            max_running_requests=config.max_running_requests,
            chunked_prefill_size=config.chunked_prefill_size,
            weight_bytes=weight_bytes(self._loaded),
            kv_bytes=self._kv_bytes,
            ranks=self._rank_infos,
            kv_cache_dtype=config.kv_cache_dtype,
            start_seconds=dict(self.clock.seconds),
            quantization=describe(self.model),
            overlap_schedule=not config.disable_overlap_schedule,
            graphs=self.graphs.info(),
            awaits_kernels=self._awaits_kernels,
            adapters=None if self.adapters is None else self.adapters.infos(),
            adapter_slots=0 if self.adapters is None else self.adapters.slots.count,
            adapter_rank=0 if self.adapters is None else self.adapters.slots.rank,
            adapter_bytes=0 if self.adapters is None else self.adapters.slots.num_bytes,
            remarks=self._remarks,
        )

    def _load(
        self, path: str, config: EngineConfig, kernels: LinearKernels | None, *, progress: bool
    ) -> CausalLM:
        """Load this rank's part of the model."""
        settings: dict[str, Any] = {
            "quantization": config.quantization,
            "lacking": self.platform.lacking_dtypes,
            "shard": self.shard,
            "context_length": config.context_length,
            "code": config.model_code,
        }
        if config.load_format == "dummy":
            return random_model(path, self.dtype, self.device, kernels, **settings)
        settings["takes_images"] = self.images is not None
        model = load_model(path, self.dtype, self.device, progress, kernels, **settings)
        if self.images is not None and model.turns_images:
            self.images.rotary = model.model.rotaries[0]  # type: ignore[assignment]
        return model

    def _make_adapters(self, config: EngineConfig) -> AdapterStore | None:
        rows = most_rows(resolve_steps(config, self.model.config, self.platform))
        return make_adapters(config, self.model, self.platform, self.dtype, rows)

    def _take_place(self, config: EngineConfig) -> None:
        """Choose this rank's cores or device. Raise `ValueError` if the machine has too few."""
        place = Place(
            config.replica * self.ranks.local_size + self.ranks.local_rank,
            config.replicas * self.ranks.local_size,
            config.cpu_bind,
        )
        if config.replicas > 1:
            self.platform.check_ranks(place.size)
        self.platform.set_up(config.num_threads, place)
        self.platform.use_device(place.rank)

    def _meet(self) -> Group | None:
        """Wait until every rank has loaded its part of the model and return their group.

        Return None without other ranks. Raise `ValueError` if a rank fails for a reason that the
        user can change.
        """
        if self.ranks.size == 1:
            return None
        self.ranks.gather_objects(None)
        self.ranks.make_group(self.platform)
        return get_group(TENSOR_PARALLEL)

    @property
    def _sharers(self) -> int:
        """Number of ranks that allocate from the same memory as this one."""
        shared = self.ranks.local_size * self._replicas
        return shared if self.platform.ranks_share_memory else 1

    def _resolve(self, config: EngineConfig, backend: AttentionBackend) -> ResolvedConfig:
        """Choose every number of the engine, the size of the KV cache last.

        Without a flag for that size, a memory profile measures it.
        """
        steps = resolve_steps(config, self.model_config, self.platform)
        window = window_of(self._layouts, steps.context_length)
        windowed = [each for each in self._layouts if is_windowed(each, window)]
        others = [each for each in self._layouts if not is_windowed(each, window)]
        self._windows: WindowPages | None = None
        if window is not None:
            shared = shared_pages(self._layouts, window) if self.platform.shares_pages else None
            self._windows = WindowPages(window, page_bytes(windowed, steps.page_size), shared)
        slot = slot_bytes(self._state_layouts)
        if config.max_total_tokens is None and steps.mem_fraction_static is None:
            # Profile with as many requests as have room for their recurrent states.
            tried = steps
            if slot:
                now = self.platform.memory().free
                tried = with_states(steps, now, slot, has_pages=bool(self._layouts))
            least = replace(steps, window_pages=LEAST_PAGES, kv_slabs=LEAST_PAGES)
            pool = self._make_pool(least)
            attention = PagedAttention(backend=backend, pool=pool, states=self._make_states(1))
            free = profile_memory(
                *(self.model, self.platform, tried, attention, self.seen_lengths, self.ranks),
                self.compute_logits,
                None if self.adapters is None else self.adapters.slots.step,
                self.images,
            )
        else:
            free = self.platform.memory().free
        free = self.ranks.minimum(free // self._sharers)
        resolved = resolve_cache(
            steps,
            config.max_total_tokens,
            free_bytes=free,
            page_bytes=page_bytes(others, steps.page_size),
            window=self._windows,
            slot_bytes=slot,
        )
        if resolved.max_running_requests < steps.max_running_requests:
            logger.warning(
                "running requests cut from %d to %d: the recurrent states of each take %.1f MiB",
                steps.max_running_requests,
                resolved.max_running_requests,
                slot / 2**20,
            )
        if resolved.context_length < steps.context_length:
            logger.warning(
                "context length cut from %d to %d tokens: the KV cache holds no more; see "
                "--max-total-tokens and --mem-fraction-static",
                steps.context_length,
                resolved.context_length,
            )
        packed = weight_bytes(self.model) * self._sharers
        packs = self.ranks.broadcast_object(self.platform.packs_linear(packed))
        return replace(resolved, passes=str(PassConfig.parse(config.passes).settled(packs=packs)))

    def _make_states(self, num_slots: int) -> StatePool | None:
        if not self._state_layouts:
            return None
        return StatePool(self._state_layouts, num_slots=num_slots, platform=self.platform)

    def _make_pool(self, config: ResolvedConfig) -> KVPool:
        windows = self._windows
        return KVPool(
            self._layouts,
            # One more for the reserved page.
            num_pages=config.max_total_tokens // config.page_size + 1,
            page_size=config.page_size,
            platform=self.platform,
            window=windows and windows.window,
            window_pages=config.window_pages,
            shared=windows and windows.shared,
            num_slabs=config.kv_slabs,
        )
