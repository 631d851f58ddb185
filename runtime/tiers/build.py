"""Builds the tiers below the KV cache of an engine."""

from __future__ import annotations

import logging
import shutil
from dataclasses import fields
from pathlib import Path

from ..cache.kv_cache import KVCache
from ..config.engine import EngineConfig
from ..config.tiers import DiskTier, parse_size
from ..executor.model_runner import ModelRunner
from ..quantization.methods import describe
from .block_copies import BlockCopies
from .block_keys import BlockKeys
from .host_store import HostStore
from .identity import weights_digest
from .segments import Segments
from .store import Store
from .tiers import Tiers

logger = logging.getLogger(__name__)

_LAYOUT = 2  # Version of what a block holds and how it is named.


def make_tiers(config: EngineConfig, runner: ModelRunner, cache: KVCache) -> Tiers | None:
    """Return the tiers that the flags ask for, or None. Raise `ValueError`."""
    stores = list[Store]()
    if config.kv_host_memory is not None:
        if runner.platform.ranks_share_memory:
            raise ValueError(
                "--kv-host-memory: the KV cache of a CPU is in the host's memory; make it larger "
                "with --mem-fraction-static or --max-total-tokens, or keep blocks with --kv-disk"
            )
        stores.append(HostStore(parse_size(config.kv_host_memory, "--kv-host-memory")))
    if config.kv_disk is not None:
        stores.append(_open(DiskTier.parse(config.kv_disk)))
    if not stores:
        return None
    if config.disable_radix_cache:
        raise ValueError(
            "--kv-disk and --kv-host-memory keep prefixes: leave --disable-radix-cache"
        )
    if config.load_format == "dummy":
        raise ValueError("--kv-disk: the random weights of --load-format dummy have no blocks")
    keys = block_keys(config, runner, runner.model_path)
    copies = BlockCopies(runner.pool, runner.states, runner.platform.synchronize)
    return Tiers(cache, copies, keys, stores)


def _open(tier: DiskTier) -> Segments:
    try:
        store = Segments(tier.folder, tier.max_bytes)
        free = shutil.disk_usage(tier.folder).free
    except OSError as error:
        raise ValueError(
            f"--kv-disk {tier.folder}: {error.strerror}; give a folder that can be written"
        ) from None
    if tier.max_bytes - store.num_bytes > free:
        logger.warning(
            "--kv-disk: %s has %.1f GiB free, less than the %.1f GiB that the tier may still take",
            tier.folder,
            free / 2**30,
            (tier.max_bytes - store.num_bytes) / 2**30,
        )
    return store


def block_keys(config: EngineConfig, runner: ModelRunner, path: str) -> BlockKeys:
    """Return the names of blocks that the weights in `path` compute.

    They depend on everything that changes keys and values of equal tokens, or their layout.
    """
    with runner.clock.phase("digest"):
        parts = (
            _LAYOUT,
            weights_digest(Path(path)),
            runner.platform.device_type,
            runner.dtype,
            [
                [getattr(layout, each.name) for each in fields(layout) if each.compare]
                for layout in runner.pool.layouts
            ],
            [each.tensors for each in runner.model.state_layouts(runner.dtype)],
            runner.pool.page_size,
            runner.model_config,
            describe(runner.model),
            config.cpu_activations,
            runner.attention_backend,
            config.batch_invariant,
        )
    return BlockKeys(repr(parts).encode(), runner.pool.page_size)
