"""One loop for text, vectors and images: each kind of engine keeps the same contract with the
process at the other end of its mailbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from diffusion_pipelines import Folder
from tiny_encoders import make_tiny_encoder
from tiny_models import make_tiny_model

from piecework.kernels.platform.platform import Platform
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.image_params import DiffusionParams
from piecework.runtime.core.messages import AbortRequests, EngineAlive, GenerateImage, Shutdown
from piecework.runtime.core.pooling_messages import PoolRequest
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.diffusion import engine as images
from piecework.runtime.diffusion.config import DiffusionConfig
from piecework.runtime.diffusion.flux import Flux
from piecework.runtime.distributed.ranks import ALONE, Alone, RankEnded
from piecework.runtime.engine import text
from piecework.runtime.engine.kind import ServedEngine, Work
from piecework.runtime.engine.loop import Loop
from piecework.runtime.executor.model_runner import ModelRunner
from piecework.runtime.pooling import engine as vectors
from piecework.runtime.pooling.config import PoolingConfig
from piecework.runtime.pooling.model import PoolingModel
from piecework.runtime.process import heartbeat
from piecework.runtime.process.ipc import decode, encode
from piecework.runtime.process.mailbox import Mailbox

POISON = 66
"""A token, or a seed, for which the computation raises."""


class Server:
    """The other end of a mailbox. It sends `messages` at once, and `Shutdown` when the requests
    `expected` have ended and `looks` more looks found nothing.
    """

    def __init__(self, *messages: Any, expected: tuple[str, ...] = (), looks: int = 0) -> None:
        self.due = list(messages)
        self.received: list[Any] = []
        self._open, self._looks, self._patience = set(expected), looks, 2000

    def poll(self, milliseconds: int) -> bool:
        self._patience -= 1
        assert self._patience > 0, f"{self._open} do not end"
        if not self.due and not self._open:
            self._looks -= 1
            if self._looks < 0:
                self.due = [Shutdown()]
        return bool(self.due)

    def receive(self) -> list[bytes]:
        return encode(self.due.pop(0))

    def send(self, frames: list[bytes]) -> bool:
        message = decode(frames)
        self.received.append(message)
        for output in getattr(message, "outputs", ()):
            if getattr(output, "finish_reason", "stop") is not None:
                self._open.discard(output.rid)
        return True

    @property
    def outputs(self) -> list[Any]:
        return [output for each in self.received for output in getattr(each, "outputs", ())]

    @property
    def errors(self) -> dict[str, bool]:
        """Whether each request that ended did so with an error."""
        return {each.rid: each.error is not None for each in self.outputs}

    def running(self) -> tuple[int, int]:
        """Of the last message with statistics."""
        found = [each.stats for each in self.received if getattr(each, "stats", None) is not None]
        return found[-1].running_requests, found[-1].queued_requests

    def serve(self, engine: ServedEngine) -> Server:
        Loop(engine, Mailbox(cast("Any", self))).run()
        return self


class Kind(NamedTuple):
    """A kind of engine over a tiny model, and a request whose computation raises if `poison`."""

    build: Callable[[], ServedEngine]
    request: Callable[[str, bool], Any]
    doing: str


def text_request(rid: str, poison: bool) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
    return GenerateRequest(rid=rid, input_ids=[5, POISON if poison else 6], params=params)


def vector_request(rid: str, poison: bool) -> PoolRequest:
    ids = np.array([5, POISON if poison else 6], "<i4").tobytes()
    return PoolRequest(rid=rid, token_ids=ids, lengths=[2])


def image_request(rid: str, poison: bool) -> GenerateImage:
    seed = POISON if poison else 1
    params = DiffusionParams(prompt="a fox", width=32, height=32, num_inference_steps=2, seed=seed)
    return GenerateImage(rid=rid, params=params)


@pytest.fixture(params=["text", "vectors", "images"])
def kind(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    pipeline_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> Kind:
    def fail_at(owner: type, name: str, is_poisoned: Callable[[Any], bool]) -> None:
        plain = getattr(owner, name)

        def method(self: Any, found: Any, *more: Any) -> Any:
            if any(map(is_poisoned, found)):
                raise RuntimeError("a fault")
            return plain(self, found, *more)

        monkeypatch.setattr(owner, name, method)

    if request.param == "text":
        fail_at(ModelRunner, "execute", lambda each: POISON in each[0].tokens[:2])
        path = make_tiny_model(tmp_path_factory.mktemp("text"), num_hidden_layers=1)
        config = EngineConfig(
            model_path=str(path), max_total_tokens=512, num_threads=1, disable_cuda_graph=True
        )
        return Kind(lambda: text.build(asdict(config), ALONE), text_request, "computing a step")
    if request.param == "vectors":
        fail_at(PoolingModel, "run", lambda each: POISON in each.token_ids)
        folder = make_tiny_encoder(tmp_path_factory.mktemp("vectors"), "bert")
        settings = asdict(PoolingConfig(model_path=str(folder), num_threads=1))
        return Kind(lambda: vectors.build(settings, ALONE), vector_request, "computing a batch")
    fail_at(Flux, "predict", lambda each: each.params.seed == POISON)
    settings = asdict(DiffusionConfig(model_path=str(pipeline_folder("flux")), num_threads=1))
    return Kind(lambda: images.build(settings, ALONE), image_request, "making images")


def test_every_request_ends_and_the_last_figures_are_true(kind: Kind) -> None:
    rids = ("a", "b", "c")
    server = Server(*(kind.request(rid, False) for rid in rids), expected=rids)
    server.serve(kind.build())
    assert server.errors == dict.fromkeys(rids, False)
    assert server.running() == (0, 0)


def test_an_aborted_request_gives_nothing_and_leaves_the_figures(kind: Kind) -> None:
    requests = [kind.request(rid, False) for rid in ("gone", "stays")]
    server = Server(*requests, AbortRequests(rids=["gone", "never seen"]), expected=("stays",))
    assert server.serve(kind.build()).errors == {"stays": False}
    server = Server(requests[0], AbortRequests(rids=["gone"]))
    assert server.serve(kind.build()).errors == {} and server.running() == (0, 0)


def test_an_error_of_one_request_ends_that_request(kind: Kind) -> None:
    rids = ("a", "poison", "b")
    server = Server(*(kind.request(rid, rid == "poison") for rid in rids), expected=rids)
    assert server.serve(kind.build()).errors == {"a": False, "poison": True, "b": False}


def test_a_step_gives_signs_of_life_that_say_what_it_does(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_MS", 0)
    server = Server(kind.request("a", False), expected=("a",)).serve(kind.build())
    first = next(index for index, each in enumerate(server.received) if hasattr(each, "outputs"))
    beats = [each.doing for each in server.received[:first] if isinstance(each, EngineAlive)]
    # One before the step, and others from its layers.
    assert beats.count(kind.doing) > 1


@pytest.mark.parametrize(("looks", "rests"), [(0, 0), (1, 1), (4, 1)])
def test_memory_is_given_back_after_loading_and_once_at_rest(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, looks: int, rests: int
) -> None:
    given: list[bool] = []
    monkeypatch.setattr(Platform, "give_back_memory", lambda self: given.append(True))
    engine = kind.build()
    loaded = len(given)
    Server(looks=looks).serve(engine)
    assert loaded > 0 and len(given) == loaded + rests


class OneStep:
    """An engine that has work once. `during` is called in its step with the loop's `pause`."""

    def __init__(self, ranks: Alone, during: Callable[[Callable[[], None]], None]) -> None:
        self.ranks, self._during = ranks, during
        self.handled: list[Any] = []
        self.is_closed, self._has_work = False, True

    def connect(self, beat: Callable[[], None], pause: Callable[[], None]) -> None:
        self._pause = pause

    def work(self) -> Work | None:
        return Work("working") if self._has_work else None

    def handle(self, message: Any) -> tuple[()]:
        self.handled.append(message)
        return ()

    def step(self) -> Iterator[Any]:
        if self._has_work:
            self._has_work = False
            self._during(self._pause)
        yield from ()

    def report(self) -> EngineAlive:
        return EngineAlive(doing="reported")

    def close(self) -> None:
        self.is_closed = True


class ClosedRanks(Alone):
    """Ranks that note how they are closed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.closed: list[bool] = []

    def close(self, *, reason: str | None = None, lost: bool = False) -> None:
        self.closed.append(lost)


def test_messages_are_handled_and_results_sent_where_a_long_step_pauses() -> None:
    server = Server(image_request("before", False), looks=1)

    def during(pause: Callable[[], None]) -> None:
        assert [each.rid for each in engine.handled] == ["before"]
        server.due = [image_request("meanwhile", False)]
        pause()
        assert [each.rid for each in engine.handled] == ["before", "meanwhile"]
        assert EngineAlive(doing="reported") in server.received

    engine = OneStep(ClosedRanks(1), during)
    server.serve(cast("Any", engine))
    assert engine.is_closed and engine.ranks.closed == [False]


@pytest.mark.parametrize("error", [RuntimeError("a fault"), RankEnded("rank 1 has ended")])
@pytest.mark.parametrize("size", [1, 2])
def test_an_error_of_a_step_ends_the_process_and_its_ranks(error: Exception, size: int) -> None:
    def during(pause: Callable[[], None]) -> None:
        raise error

    engine = OneStep(ClosedRanks(size), during)
    with pytest.raises(SystemExit if size > 1 else type(error)):
        Server().serve(cast("Any", engine))
    assert engine.ranks.closed == [True] and not engine.is_closed
