"""The control channel between rank 0 and another, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from threading import Thread
from typing import Any
from unittest.mock import Mock

import pytest

from piecework.kernels.collectives import CollectiveError
from piecework.runtime.distributed import processes
from piecework.runtime.distributed.channel import Follower, Leader
from piecework.runtime.distributed.ranks import Diverged, EngineEnded, RankEnded
from piecework.runtime.engine.rank_process import follow


class Pair:
    """Rank 0, rank 1, and the latter's end of the connection."""

    def __init__(self) -> None:
        ours, self.theirs = Pipe()
        self.ours = ours

        def end(say: Callable[[], None] | None) -> None:
            if say is not None:
                say()
            ours.close()

        self.leader = Leader([ours], lambda *_: None, end, local_size=2)
        self.follower = Follower(1, 2, self.theirs, lambda *_: None, local_size=2)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.leader.close()
    pair.theirs.close()


def test_what_rank_0_tells_comes_in_its_order(pair: Pair) -> None:
    """It waits for nobody."""
    pair.leader.call("add", {"rid": "a"})
    assert pair.leader.broadcast_object([1, 2]) == [1, 2]
    pair.leader.call("step")
    pair.leader.check((0, 3))
    assert pair.follower.next_call() == ("add", ({"rid": "a"},))
    assert pair.follower.broadcast_object(None) == [1, 2]  # type: ignore[comparison-overlap]
    assert pair.follower.next_call() == ("step", ())
    pair.follower.check((0, 3))


def test_all_get_the_least_value(pair: Pair) -> None:
    pair.follower.gather_objects(5)
    assert pair.leader.minimum(7) == 5
    assert pair.follower.broadcast_object(0) == 5


def test_a_rank_0_that_stops_between_two_steps_is_found(pair: Pair) -> None:
    pair.leader.call("step")
    assert pair.follower.next_call(within=5) == ("step", ())
    with pytest.raises(
        CollectiveError, match=r"rank 1 waits for rank 0, .* within 0\.05 s"
    ) as late:
        pair.follower.next_call(within=0.05)
    assert late.value.missing == [0]


def test_a_rank_that_takes_nothing_is_not_waited_for(pair: Pair) -> None:
    processes._limit_sending(pair.ours, 0.1)
    with pytest.raises(RankEnded, match="rank 1 did not read a message"):
        pair.leader.call("add", bytes(2**22))


@pytest.mark.parametrize("has_work", [True, False])
def test_rank_0_may_take_its_time_where_there_is_no_request(has_work: bool) -> None:
    class Calls:
        def next_call(self, within: float | None = None) -> tuple[str, tuple[Any, ...]]:
            given.append(within)
            raise EngineEnded(None)

    given: list[float | None] = []
    with pytest.raises(EngineEnded):
        follow(Mock(expects_step=has_work), Calls(), 7.0)
    assert given == [7.0 if has_work else None]


def test_another_step_is_found(pair: Pair) -> None:
    pair.leader.check((1, 2))
    with pytest.raises(Diverged, match=r"rank 1 computes step \(1, 3\), rank 0 \(1, 2\)"):
        pair.follower.check((1, 3))


def test_another_turn_is_found(pair: Pair) -> None:
    pair.leader.call("step")
    with pytest.raises(Diverged, match="rank 1 waits for a value, rank 0 sent a call"):
        pair.follower.broadcast_object(0)


def test_a_rank_that_cannot_start_says_why_through_rank_0(pair: Pair) -> None:
    """And ends once that has been heard."""
    failing = Thread(target=pair.follower.fail, args=("too little memory; take a smaller model",))
    failing.start()
    with pytest.raises(ValueError, match="rank 1: too little memory; take a smaller model"):
        pair.leader.gather_objects(None)
    assert failing.is_alive()
    pair.leader.close(reason="rank 1: too little memory")
    failing.join(10)
    assert not failing.is_alive()


def test_a_rank_that_is_gone_is_named(pair: Pair) -> None:
    pair.theirs.close()
    with pytest.raises(RankEnded, match="rank 1 has ended"):
        pair.leader.gather_objects(None)
    with pytest.raises(RankEnded, match="rank 1 has ended"):
        pair.leader.call("step")


def test_ranks_hear_that_rank_0_is_gone(pair: Pair) -> None:
    pair.leader.close(lost=True)
    with pytest.raises(RankEnded, match="rank 0 has ended"):
        pair.follower.next_call()


@pytest.mark.parametrize("reason", [None, "the model is too large"])
def test_ranks_hear_that_the_engine_ends_for_good_and_why(pair: Pair, reason: str | None) -> None:
    pair.leader.close(reason=reason)
    with pytest.raises(EngineEnded) as error:
        pair.follower.broadcast_object(0)
    assert error.value.reason == reason
