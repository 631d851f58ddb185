"""All kinds of cache, alone and together, against a memory that remembers what was written where.

Requests begin, run in common steps, give way and end at random. What a step reads must be what
the request's own tokens wrote, a prefix is found as far as a search by hand finds it, and after
every action each block has one owner.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from piecework.runtime.cache.kinds import make_cache
from piecework.runtime.cache.kv_cache import KVCache
from piecework.runtime.cache.pins import Clock
from piecework.runtime.cache.radix import RadixCache
from piecework.runtime.cache.recurrent_states import RecurrentStates
from piecework.runtime.cache.room import Room
from piecework.runtime.cache.slabs import SharedPages, Slabs
from piecework.runtime.cache.window_pages import WindowPages
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.request import Request
from piecework.runtime.core.sampling_params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=1)


def request_of(
    tokens: list[int], tenant: str = "", keep: list[tuple[int, float]] | None = None
) -> Request:
    message = GenerateRequest(
        rid="r", input_ids=tokens, params=PARAMS, tenant=tenant, keep=keep or []
    )
    return Request(message, seed=0, stop_ids=frozenset(), max_tokens=1000)


class Text:
    """Parts of a text, each with the namespace of its request."""

    def __init__(self, namespace: bytes, tokens: list[int]) -> None:
        self._namespace, self._tokens = namespace, tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, part: slice) -> tuple[bytes, tuple[int, ...]]:
        return self._namespace, tuple(self._tokens[part])


class Machine:
    """Runs requests in a cache. A place of a page holds its tenant and all tokens up to its own."""

    def __init__(self, page_size: int, window: int, **sizes: Any) -> None:
        self.cache = make_cache(page_size=page_size, snapshot_tokens=2, window=window or None,
                                **sizes)  # fmt: skip
        self.page_size, self.window = page_size, window
        self.shares_memory = sizes.get("shared") is not None
        self.pages: dict[int, Any] = {}
        self.window_pages: dict[int, Any] = {}
        self.states: dict[int, Any] = {0: ()}
        self.requests: list[Request] = []

    def step(self, chosen: list[tuple[Request, int, bool]]) -> None:
        """Run requests in one step, at most so many tokens of each, some planned twice."""
        plan: list[tuple[Request, int]] = []
        for request, most, again in chosen:
            if request.node is None:
                expected = self.longest_prefix(request)
                self.cache.attach(request)
                assert request.num_computed == expected
            if request.num_computed == request.num_tokens:
                request.add_placeholder(0)
                request.resolve([1])
            wanted = request.num_tokens - request.num_computed
            num_new = self.cache.limit(request, min(most, wanted))
            assert 1 <= num_new <= most
            fits, cached = self.cache.has_room(request, num_new, 0), self.cache.tree.total_pages
            if again:
                self.cache.reserve(request, num_new)
                num_new = self.cache.limit(request, max(1, num_new - 1))
            if self.cache.reserve(request, num_new):
                plan.append((request, num_new))
            else:
                if not self.shares_memory:
                    assert not fits, "a reservation fails although there is room"
                    assert self.cache.tree.total_pages == cached, "pages are evicted in vain"
                self.cache.release(request)
            self.check()
        self.run(plan)
        for request, num_new in plan:
            self.cache.advance(request, num_new)
            self.check()

    def run(self, plan: list[tuple[Request, int]]) -> None:
        """Write and read as the layers do."""
        copied = {request.state.number: self.states[request.state_source]
                  for request, _ in plan if request.state_source is not None}  # fmt: skip
        self.states |= copied
        for request, num_new in plan:
            text = Text(request.namespace, request.tokens.tolist())
            begin, end = request.num_computed, request.num_computed + num_new
            if request.state is not None:
                assert self.states[request.state.number] == (text[:begin] if begin else ())
                self.states[request.state.number] = text[:end]
            for place in range(begin // self.page_size, -(-end // self.page_size)):
                written = text[: min(end, (place + 1) * self.page_size)]
                self.pages[request.pages[place]] = written
                if self.window:
                    self.window_pages[request.window[place].number] = written
            self.read(request, text, begin, end)
        for request, _ in plan:
            if request.snapshot is not None:
                self.states[request.snapshot.number] = self.states[request.state.number]

    def read(self, request: Request, text: Text, begin: int, end: int) -> None:
        size = self.page_size
        for place in range(-(-end // size)):
            assert self.pages[request.pages[place]] == text[: min(end, (place + 1) * size)]
        if self.window:
            for place in range(max(0, begin - self.window + 1) // size, -(-end // size)):
                own = self.window_pages[request.window[place].number]
                assert own == text[: min(end, (place + 1) * size)]

    def longest_prefix(self, request: Request) -> int:
        """The prefix that a request must find, in tokens, searched by hand."""
        tokens, size, best = request.tokens[:-1].tolist(), self.page_size, 0
        for node in self.cache.tree.nodes():
            path = [node]
            while (parent := path[0].parent) is not None and parent.parent is not None:
                path.insert(0, parent)
            if not path[0].key.startswith(request.namespace + path[0].tokens[:size].tobytes()):
                continue
            text = [token for part in path for token in part.tokens.tolist()]
            columns = [[block for part in path for block in part.columns[number]]
                       for number in range(len(self.cache.managers))]  # fmt: skip
            for end in range(1, len(text) // size + 1):
                if text[: end * size] == tokens[: end * size] and self.can_continue(columns, end):
                    best = max(best, end * size)
        return best

    def can_continue(self, columns: list[list[Any]], end: int) -> bool:
        for manager, column in zip(self.cache.managers, columns, strict=True):
            if isinstance(manager, RecurrentStates) and not column[end - 1].number:
                return False
            if isinstance(manager, WindowPages):
                query = end * self.page_size
                reached = range(max(0, query - self.window + 1), query)
                if not all(column[position // self.page_size].number for position in reached):
                    return False
        return True

    def check(self) -> None:
        holders = [request for request in self.requests if request.node is not None]
        self.cache.check(holders)
        slots = sum(request.state is not None for request in holders)
        slots += sum(request.snapshot is not None for request in holders)
        assert self.cache.used_slots == slots
        if not self.shares_memory:
            held = {page for request in holders for page in request.pages}
            assert self.cache.used_tokens == self.page_size * len(held)


@pytest.mark.parametrize("state_slots", [0, 5], ids=["", "states"])
@pytest.mark.parametrize("windows", ["none", "own", "shared"])
def test_each_kind_has_what_a_step_reads_and_a_prefix_needs(windows: str, state_slots: int) -> None:
    for seed in range(examples(12, exploring=300)):
        serve(random.Random(seed), windows, state_slots)


def serve(chance: random.Random, windows: str, state_slots: int) -> None:
    page_size, num_pages = chance.choice([1, 2, 3]), chance.randint(14, 40)
    sizes: dict[str, Any] = {}
    if windows == "own":
        sizes = {"window_pages": chance.randint(10, num_pages)}
    elif windows == "shared":
        shared = SharedPages.of(*chance.choice([(1, 1, 1), (1, 3, 1), (2, 5, 2), (3, 1, 1)]))
        sizes = {"shared": shared, "num_slabs": shared.slabs(num_pages, num_pages // 2) + 2}
    machine = Machine(
        page_size,
        0 if windows == "none" else chance.choice([1, 2, 4, 7]),
        num_pages=num_pages,
        share_prefixes=chance.random() < 0.9,
        state_slots=state_slots,
        **sizes,
    )
    requests, texts = machine.requests, [[0]]
    for _ in range(120):
        action = chance.choice(["add", "add", "step", "step", "step", "preempt", "end", "evict"])
        if action == "add" and len(requests) < 5:
            begin = chance.choice(texts)
            more = [chance.randint(0, 1) for _ in range(chance.randint(1, 9))]
            text = [*begin[: chance.randint(0, len(begin))], *more][: 9 * page_size]
            machine.cache.pins_clock.now += 1
            keep = [(chance.randint(1, len(text)), chance.choice([1.0, 9.0]))
                    for _ in range(chance.choice([0, 1, 2]))]  # fmt: skip
            requests.append(request_of(text, chance.choice(["", "a", "another"]), keep))
            texts.append(text)
        elif action == "step":
            chosen = chance.sample(requests, chance.randint(0, len(requests)))
            machine.step(
                [(request, chance.randint(1, 12), chance.random() < 0.3) for request in chosen]
            )
        elif action == "evict" and chance.random() < 0.3:
            machine.cache.tree.evict(chance.randint(1, 10))
        elif action in ("preempt", "end") and requests:
            request = chance.choice(requests)
            machine.cache.release(request)
            if action == "end":
                texts.append(request.tokens.tolist())
                requests.remove(request)
        machine.check()
    for request in requests:
        machine.cache.release(request)
    machine.cache.flush()
    machine.cache.check([])
    for manager in machine.cache.managers:
        assert manager.room.free == manager.room.total, "memory is lost"


class Sometimes:
    """A kind of cache that can continue prefixes of some lengths."""

    hole, room = 0, Room(Slabs(2))

    def __init__(self, ends: set[int]) -> None:
        self.ends = ends

    def resumable(self, column: list[Any], end: int) -> int:
        return max(each for each in self.ends if each <= end)

    def attach(self, request: Request, column: list[Any], end: int) -> None:
        assert end in self.ends and len(column) == 9


@given(kinds=st.lists(st.frozensets(st.integers(1, 9)), min_size=1, max_size=4))
def test_a_prefix_counts_as_far_as_every_kind_can_continue_it(kinds: list[frozenset[int]]) -> None:
    managers: list[Any] = [Sometimes({0, *ends}) for ends in kinds]
    tree = RadixCache(1, managers)
    cache = KVCache(
        managers, tree, page_size=1, total_tokens=9, share_prefixes=True, pins_clock=Clock()
    )
    tree.extend(np.arange(9))
    request = request_of(list(range(12)))
    cache.attach(request)
    assert request.num_computed == max(frozenset({0}) | frozenset.intersection(*kinds))
