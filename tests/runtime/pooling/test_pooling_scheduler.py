"""Requests share batches fairly, and each gets its own vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from piecework.runtime.core.pooling_messages import PoolRequest
from piecework.runtime.pooling.config import PoolingConfig
from piecework.runtime.pooling.scheduler import PoolingScheduler

BUDGET = 16


class ToyModel:
    """A text's vector is its first and its last token id."""

    config = PoolingConfig(model_path="toy")
    size = 2
    token_budget = BUDGET

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.poison = -1
        self.nothing = -1

    def run(self, inputs: Any) -> np.ndarray:
        batch = [each.token_ids.tolist() for each in inputs]
        if any(self.poison in ids for ids in batch):
            raise RuntimeError("poison")
        self.batches.append(batch)
        found = np.array([[ids[0], ids[-1]] for ids in batch], np.float32)
        found[found == self.nothing] = np.nan
        return found


def request(rid: str, texts: list[list[int]]) -> PoolRequest:
    ids = np.concatenate([np.array(text, "<i4") for text in texts]).tobytes()
    return PoolRequest(rid=rid, token_ids=ids, lengths=[len(text) for text in texts])


def vectors(data: bytes) -> list[list[float]]:
    return np.frombuffer(data, "<f4").reshape(-1, 2).tolist()


TEXTS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), min_size=1, max_size=9)


@given(st.lists(TEXTS, min_size=1, max_size=5), st.data())
def test_every_request_gets_its_vectors_within_the_budget(
    requests: list[list[list[int]]], data: st.DataObject
) -> None:
    model = ToyModel()
    scheduler, waiting = PoolingScheduler(model), list(enumerate(requests))  # type: ignore[arg-type]
    found = {}
    while waiting or scheduler.has_work:
        if waiting and (not scheduler.has_work or data.draw(st.booleans())):
            number, texts = waiting.pop(0)
            scheduler.add(request(str(number), texts))
        step = scheduler.step()
        found |= {output.rid: vectors(output.vectors) for output in step.outputs}
    assert found == {
        str(number): [[text[0], text[-1]] for text in texts]
        for number, texts in enumerate(requests)
    }
    assert all(len(batch) == 1 or sum(map(len, batch)) <= BUDGET for batch in model.batches)
    assert scheduler.stats().running_requests == 0


def test_a_small_request_does_not_wait_for_a_large_one() -> None:
    scheduler = PoolingScheduler(ToyModel())  # type: ignore[arg-type]
    scheduler.add(request("large", [[1] * 8] * 100))
    scheduler.add(request("small", [[2] * 8]))
    assert [output.rid for output in scheduler.step().outputs] == ["small"]


def test_what_fails_ends_its_request_alone() -> None:
    model = ToyModel()
    model.poison, model.nothing = 7, 9
    scheduler = PoolingScheduler(model)  # type: ignore[arg-type]
    for rid, texts in (("a", [[1], [2]]), ("b", [[7], [3]]), ("c", [[9], [4]]), ("d", [[5]])):
        scheduler.add(request(rid, texts))
    outputs = []
    while scheduler.has_work:
        outputs += scheduler.step().outputs
    errors = {output.rid: output.error for output in outputs}
    assert errors["a"] is errors["d"] is None
    assert "poison" in str(errors["b"]) and "not finite" in str(errors["c"])
    assert len(outputs) == 4 and scheduler.stats().running_requests == 0


def test_an_aborted_request_is_computed_no_further() -> None:
    scheduler = PoolingScheduler(ToyModel())  # type: ignore[arg-type]
    scheduler.add(request("gone", [[1] * 8] * 9))
    scheduler.step()
    scheduler.abort(["gone", "unknown"])
    assert not scheduler.has_work and scheduler.stats().running_requests == 0
