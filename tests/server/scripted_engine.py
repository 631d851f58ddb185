"""An `Engine` that says what a test scripts, through the runtime's own text side: real tokenizer,
detokenizer, messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from piecework.runtime.core.adapter_info import AdapterInfo
from piecework.runtime.core.control_messages import Control, Controlled
from piecework.runtime.core.engine_info import EngineInfo
from piecework.runtime.core.generation import FinishReason, TokenLogprob, TokenOutput
from piecework.runtime.core.messages import EngineStats, ProfileAnswer, StartProfile, StopProfile
from piecework.runtime.tokenizer.output_processor import RequestState, process_outputs
from piecework.runtime.tokenizer.tokenizer import Tokenizer
from piecework.server.engine.state import EngineState, EngineUnavailable, Progress, QueueFull

CONTEXT_LENGTH = 256
REPLY = "Hello there, old friend! The weather is fine today."
INFO = EngineInfo(
    model_path="scripted",
    architecture="ScriptedForCausalLM",
    dtype="float32",
    device="cpu",
    attention_backend="torch",
    vocab_size=512,
    context_length=CONTEXT_LENGTH,
    kv_tokens=4096,
    page_size=16,
    max_running_requests=8,
    chunked_prefill_size=64,
    weight_bytes=1000,
    kv_bytes=2000,
    start_seconds={"weights": 0.5},
)


@dataclass
class Script:
    """What the engine does; tests change it. `reply`: the tokens of a sequence, repeated for ever
    and then cut by its limits.
    """

    reply: Callable[[RequestState], list[int]]
    delay: float = 0.0
    """Seconds before each token."""
    held: bool = False
    """While true no sequence gets a token: all wait in the queue."""
    room: int = 1000
    """Sequences that may be under way at once; more are refused."""
    tokens_per_step: int = 1
    fail_after: int | None = None
    """Tokens after which a sequence ends with `FinishReason.ERROR`."""
    fail_code: str | None = None
    """Its code."""


class ScriptedEngine:
    """`requests` came, `running` are under way, `dropped` were closed by their reader before their
    end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.state = EngineState.READY
        self.restarts = self.hangs = 0
        self.engine_pid: int | None = None
        self.silence = 0.0
        self.replicas: tuple[ScriptedEngine, ...] = ()
        self.adapters: dict[str, AdapterInfo] = {}
        self.failure: str | None = None
        self.info: EngineInfo | None = INFO
        self.stats = EngineStats(
            kv_tokens_total=4096,
            kv_tokens_used=1024,
            kv_tokens_cached=128,
            running_requests=3,
            queued_requests=2,
        )
        self.tokenizer = tokenizer
        self.script = Script(
            reply=lambda request: tokenizer.encode(REPLY, add_special_tokens=False)
        )
        self.requests: list[RequestState] = []
        self.running: set[str] = set()
        self.controls: list[Control] = []
        self.control_error: str | None = None
        self.asleep = False
        self.profiles: list[StartProfile | StopProfile] = []
        self.dropped: list[str] = []
        self._aborted: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    def unfinished(self) -> Iterator[RequestState]:
        return (request for request in self.requests if request.rid in self.running)

    @property
    def capacity(self) -> int:
        return 1000

    @property
    def progress(self) -> Progress | None:
        is_starting = self.state in (EngineState.STARTING, EngineState.RESTARTING)
        return Progress("preparing weights", 7) if is_starting else None

    def require_room(self, count: int) -> None:
        if self.state in (EngineState.FAILED, EngineState.STOPPED):
            raise EngineUnavailable("the engine process ended")
        if len(self.running) + count > self.script.room:
            raise QueueFull(f"{self.script.room} requests wait already")

    def add_request(self, request: RequestState) -> None:
        self.require_room(1)
        assert request.rid not in self.running
        self.requests.append(request)
        self.running.add(request.rid)
        self._aborted.discard(request.rid)
        self._tasks[request.rid] = asyncio.create_task(self._run(request))

    def drop(self, requests: Iterable[RequestState]) -> None:
        for request in requests:
            if request.rid in self.running and not request.finished:
                self._tasks.pop(request.rid).cancel()
                self.running.discard(request.rid)
                self.dropped.append(request.rid)

    async def _run(self, request: RequestState) -> None:
        while not request.finished:
            step = await self._step(request)
            if step.finish_reason is not None:
                self.running.discard(request.rid)
            process_outputs({request.rid: request}, [step])
        self.running.discard(request.rid)

    async def abort(self, rid: str | None) -> int:
        chosen = {
            request.rid
            for request in self.requests
            if request.rid in self.running and (rid is None or request.goes_by(rid))
        }
        self._aborted |= chosen
        return len(chosen)

    async def flush_cache(self) -> int:
        if self.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self.state}")
        return self.stats.kv_tokens_cached

    async def control(self, message: Control) -> list[Controlled]:
        self.controls.append(message)
        return [Controlled(error=self.control_error, freed_bytes=7, numbers=[0.5, 0.25])]

    async def profile(self, message: StartProfile | StopProfile) -> list[ProfileAnswer]:
        self.profiles.append(message)
        return [ProfileAnswer(path="/traces/1.trace.json.gz")]

    async def _step(self, request: RequestState) -> TokenOutput:
        script, rid, count = self.script, request.rid, len(request.output_ids)
        due = time.monotonic() + script.delay
        while rid not in self._aborted and (script.held or time.monotonic() < due):
            await asyncio.sleep(0.002)
        await asyncio.sleep(0)
        if rid in self._aborted:
            return TokenOutput(rid=rid, token_ids=[], finish_reason=FinishReason.ABORT)
        if script.fail_after is not None and count >= script.fail_after:
            return TokenOutput(
                rid=rid,
                token_ids=[],
                finish_reason=FinishReason.ERROR,
                error="it broke",
                code=script.fail_code,
            )
        return self._tokens(request, count)

    def _tokens(self, request: RequestState, count: int) -> TokenOutput:
        """The next tokens, cut at the first that ends the sequence."""
        params, reply = request.params, self.script.reply(request)
        stops = {*params.stop_token_ids} | (
            set() if params.ignore_eos else {*self.tokenizer.eos_token_ids}
        )
        tokens: list[int] = []
        reason = FinishReason.LENGTH if params.max_new_tokens == 0 else None
        while reason is None and len(tokens) < self.script.tokens_per_step:
            tokens.append(reply[(count + len(tokens)) % len(reply)])
            if tokens[-1] in stops:
                reason = FinishReason.STOP
            elif count + len(tokens) >= params.max_new_tokens:
                reason = FinishReason.LENGTH
        positions = range(
            len(request.prompt_ids) + count, len(request.prompt_ids) + count + len(tokens)
        )
        top = params.logprobs
        return TokenOutput(
            rid=request.rid,
            token_ids=tokens,
            finish_reason=reason,
            stop_token_id=tokens[-1] if reason is FinishReason.STOP else None,
            cached_tokens=len(request.prompt_ids) // 2,
            logprobs=None
            if top is None
            else [scripted_logprob(t, at, top) for t, at in zip(tokens, positions, strict=True)],
            prompt_logprobs=_prompt_logprobs(request) if count == 0 else None,
        )


def scripted_logprob(token_id: int, position: int, top: int) -> TokenLogprob:
    """Made up, and different for each token and position: the token is the second likeliest, after
    its neighbour.
    """
    logprob = -0.01 * token_id - 0.001 * position - 1.0
    alternatives = [
        (token_id + 1, logprob + 0.5),
        (token_id, logprob),
        *((i, logprob - i) for i in range(1, 100)),
    ]
    return TokenLogprob(token_id=token_id, logprob=logprob, top=alternatives[:top])


def _prompt_logprobs(request: RequestState) -> list[TokenLogprob | None] | None:
    top, start = request.params.prompt_logprobs, request.params.prompt_logprobs_start
    if top is None:
        return None
    entries = [
        scripted_logprob(token, at, top) if at else None
        for at, token in enumerate(request.prompt_ids)
    ]
    return entries[start:]


def say_once(engine: ScriptedEngine, *texts: str) -> None:
    """Answer with these texts, one after another, the last one from then on."""
    replies = iter(texts)
    known: dict[str, list[int]] = {}
    last = texts[-1]

    def reply(request: RequestState) -> list[int]:
        if request.rid not in known:
            text = next(replies, last)
            known[request.rid] = [*engine.tokenizer.encode(text, add_special_tokens=False), 2]
        return known[request.rid]

    engine.script.reply = reply


def prompt_of(engine: ScriptedEngine, number: int = -1) -> str:
    return engine.tokenizer.decode(engine.requests[number].prompt_ids, skip_special_tokens=False)
