"""A model for tests of the engine core: its next token depends on every token before, read back
from a paged cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from piecework.kernels.collectives import Group
from piecework.runtime.cache.kinds import make_cache
from piecework.runtime.cache.slabs import SharedPages
from piecework.runtime.core.batch import Batch, Layout
from piecework.runtime.core.generation import TokenOutput
from piecework.runtime.core.request import Scheduled
from piecework.runtime.distributed.ranks import ALONE, Ranks
from piecework.runtime.engine.core import EngineCore
from piecework.runtime.engine.prompt_pace import PromptPace
from piecework.runtime.executor.step import PendingStep
from piecework.runtime.graphs.graph_runner import GraphCounts
from piecework.runtime.sampling.grammar_cache import Grammars
from piecework.runtime.speculative.speculation import Speculation

VOCAB = 101
EOS = 100


def digest(tokens: np.ndarray, value: int = 7) -> int:
    """A number that changes with any token and with their order, from that of those before on."""
    for token in tokens.tolist():
        value = (value * 31 + token + 1) % 1_000_003
    return value


def continuation(prompt: list[int], count: int) -> list[int]:
    """What greedy decoding gives, end-of-sequence ignored."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(digest(np.array(tokens)) % VOCAB)
    return tokens[len(prompt) :]


class ToyRunner:
    """Stores token ids as keys and values, so that a page that two requests share by mistake gives
    a wrong token.
    """

    device = torch.device("cpu")
    group: Group | None = None
    vocab_size = VOCAB
    eos_token_ids = frozenset({EOS})
    adapters = images = None

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.cache = np.full(num_pages * page_size, -1)
        self.page_size = page_size
        self.layout = Layout(page_size, self.device, torch.int64)
        self.step_tokens: list[int] = []

    def execute(self, scheduled: list[Scheduled], previous: PendingStep | None) -> PendingStep:
        return PendingStep(self, scheduled, previous)

    def forward(self, batch: Batch) -> torch.Tensor:
        metadata = batch.metadata
        self.cache[metadata.slot_mapping.numpy()] = batch.input_ids.numpy()
        self.step_tokens.append(batch.num_tokens)
        rows = []
        for index, (query_len, seq_len) in enumerate(
            zip(metadata.query_lens, metadata.seq_lens, strict=True)
        ):
            position = np.arange(seq_len)
            slots = (
                metadata.block_table[index].numpy()[position // self.page_size] * self.page_size
                + position % self.page_size
            )
            seen = self.cache[slots]
            rows += [digest(seen[: end + 1]) for end in range(seq_len - query_len, seq_len)]
        return torch.tensor(rows)[:, None]

    def forward_to_logits(self, batch: Batch) -> torch.Tensor | None:
        return None

    def choose(self, batch: Batch) -> list[int] | None:
        return None

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        logits = torch.zeros(hidden.shape[0], VOCAB)
        logits.scatter_(1, hidden % VOCAB, 5.0)
        return logits

    def compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("there are no other ranks")

    def synchronize(self) -> None:
        pass

    def graph_counts(self) -> GraphCounts:
        return GraphCounts()


class WholeStepToyRunner(ToyRunner):
    """Small steps give tokens or logits at once, as those of the CPU's native kernels do."""

    def forward_to_logits(self, batch: Batch) -> torch.Tensor | None:
        if not batch.has_decodes:
            return None
        return self.compute_logits(self.forward(batch).index_select(0, batch.sample_rows))

    def choose(self, batch: Batch) -> list[int] | None:
        if not all(request.params.greedy for request in batch.samplers):
            return None
        logits = self.forward_to_logits(batch)
        return None if logits is None else logits.argmax(-1).tolist()


class RecurrentToyRunner(ToyRunner):
    """Beside the pages it keeps the number that it has made of a request's tokens, in the request's
    slot: pages and states must tell of the same tokens.
    """

    def __init__(self, num_pages: int, page_size: int, num_slots: int = 9) -> None:
        super().__init__(num_pages, page_size)
        self.states = np.full(num_slots, -1)
        self.states[0] = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        assert batch.metadata.state_slots is not None
        slots = batch.metadata.state_slots.numpy()
        assert len(set(slots)) == len(slots) and 0 not in slots
        self._copy(batch.state_copies)
        for slot, new in zip(slots, batch.input_ids.split(batch.metadata.query_lens), strict=True):
            self.states[slot] = _continued(int(self.states[slot]), new.numpy())
        hidden = super().forward(batch)
        ends = np.cumsum(batch.metadata.query_lens) - 1
        assert hidden[ends, 0].tolist() == (self.states[slots] + 7).tolist()
        self._copy(batch.snapshots)
        return hidden

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        sources, targets = np.array(pairs, np.int64).reshape(-1, 2).T
        self.states[targets] = self.states[sources]


def _continued(state: int, new: np.ndarray) -> int:
    """`digest` less what it begins with, so that nothing is 0."""
    return digest(new, state + 7) - 7


class WindowedToyRunner(ToyRunner):
    """Beside all pages it keeps those of a window of 5 tokens, and looks at each step whether they
    have the tokens that the window reaches.
    """

    window = 5

    def __init__(self, num_pages: int, page_size: int, window_pages: int = 0) -> None:
        super().__init__(num_pages, page_size)
        self.window_cache = np.full((window_pages or num_pages) * page_size, -1)

    def forward(self, batch: Batch) -> torch.Tensor:
        metadata = batch.metadata.window
        assert metadata is not None
        hidden = super().forward(batch)
        self.window_cache[metadata.slot_mapping.numpy()] = batch.input_ids.numpy()
        for row, (new, end) in enumerate(zip(metadata.query_lens, metadata.seq_lens, strict=True)):
            position = np.arange(max(0, end - new - self.window + 1), end)
            page, offset = position // self.page_size, position % self.page_size
            own, whole = (
                table[row].numpy()[page] * self.page_size + offset
                for table in (metadata.block_table, batch.metadata.block_table)
            )
            assert (own >= self.page_size).all(), "a page that a window reaches was given back"
            assert (self.window_cache[own] == self.cache[whole]).all()
        return hidden


class HybridToyRunner(WindowedToyRunner, RecurrentToyRunner):
    """It has windows and states."""


class SharedToyRunner(WindowedToyRunner):
    """Both kinds of pages lie in one memory, and each has all tensors of its layers there: who gets
    a page that another still needs finds wrong tokens in it.
    """

    def __init__(self, num_pages: int, page_size: int, shared: SharedPages, num_slabs: int) -> None:
        super().__init__(num_pages, page_size)
        self.memory = np.full((num_slabs + 1) * shared.tensors * page_size, -1)
        self.shared = shared
        self.cache, self.window_cache = (
            self.memory[(kind.tensors - 1) * kind.per_slab * page_size :]
            for kind in (shared.full, shared.window)
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        assert batch.metadata.window is not None
        for metadata, kind in (
            (batch.metadata, self.shared.full), (batch.metadata.window, self.shared.window)
        ):  # fmt: skip
            for tensor in range(kind.tensors):
                distance = tensor * kind.per_slab * self.page_size
                self.memory[metadata.slot_mapping.numpy() + distance] = batch.input_ids.numpy()
        return super().forward(batch)


def make_core(
    *,
    num_pages: int = 65,
    page_size: int = 4,
    token_budget: int = 32,
    max_running_requests: int = 8,
    context_length: int = 10_000,
    share_prefixes: bool = True,
    overlap: bool = False,
    runner_class: Callable[[int, int], ToyRunner] = ToyRunner,
    state_slots: int = 0,
    window_pages: int = 0,
    shared: SharedPages | None = None,
    num_slabs: int = 0,
    ranks: Ranks = ALONE,
    speculation: Speculation | None = None,
    grammars: Grammars | None = None,
    pace: PromptPace | None = None,
) -> tuple[EngineCore, ToyRunner]:
    runner = runner_class(num_pages, page_size)
    core = EngineCore(
        runner,
        make_cache(
            num_pages,
            page_size,
            share_prefixes=share_prefixes,
            state_slots=state_slots,
            snapshot_tokens=4,
            window=WindowedToyRunner.window if window_pages or shared is not None else None,
            window_pages=window_pages,
            shared=shared,
            num_slabs=num_slabs,
        ),
        token_budget=token_budget,
        max_running_requests=max_running_requests,
        context_length=context_length,
        draw_seed=lambda: 1,
        overlap=overlap,
        ranks=ranks,
        speculation=speculation,
        grammars=grammars,
        pace=pace,
    )
    return core, runner


def drain(core: EngineCore, limit: int = 10_000) -> dict[str, list[TokenOutput]]:
    """Step until nothing is left, checking the pages after every step."""
    outputs: dict[str, list[TokenOutput]] = {}
    for _ in range(limit):
        if not core.has_work:
            return outputs
        for output in core.step().outputs:
            outputs.setdefault(output.rid, []).append(output)
        core.check()
    raise AssertionError(f"not finished after {limit} steps: {core.stats()}")


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def assert_idle(core: EngineCore) -> None:
    stats = core.stats()
    assert (stats.running_requests, stats.queued_requests, stats.kv_tokens_used) == (0, 0, 0)
