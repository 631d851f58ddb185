"""Sends many requests of mixed shapes, of which some are aborted or disconnected, and checks
answers and leaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from dataclasses import asdict, replace
from typing import Any

import psutil

from ...bench.apis import Answer, GenerationCall, ask
from ...bench.client import MALFORMED, Client, RequestFailed, ServerUnusable, resolve
from ...bench.load import run_load
from ...bench.report import Report
from ...bench.server_process import resident_bytes
from ...bench.target import Api, Target
from ...runtime.process.progress import progress_bar
from .checks import problems
from .faults import Faults
from .requests import Fate, Mix, SoakRequest
from .result import SoakResult, SoakSettings
from .state import read_state, wait_idle

ABORT_PATH = "/abort_request"
_WATCH_SECONDS = 0.5
_REFUSALS = (429, 503)
_LONGEST_PAUSE = 5.0  # Maximum seconds that a refused client waits, whatever `Retry-After` says.


class Refused(Exception):
    """The server refused a request. The text has the seconds to wait."""


def run(target: Target, settings: SoakSettings, mix: Mix, report: Report) -> int:
    """Soak and report. Return 1 if anything was wrong, else 0. Raises `ValueError` for an error
    that the user can correct.
    """
    if settings.server_pid is not None:
        try:
            resident_bytes(settings.server_pid)
        except ServerUnusable as error:
            raise ValueError(f"--server-pid: {error}") from None
    return asyncio.run(_run(target, settings, mix, report))


async def _run(target: Target, settings: SoakSettings, mix: Mix, report: Report) -> int:
    # The OpenAI endpoints need the name of the model.
    api = next((api for api in mix.apis if api is not Api.GENERATE), Api.GENERATE)
    target = await resolve(replace(target, api=api))
    result = await soak(target, settings, mix)
    reasons = result.verdict(settings)
    report.print([*result.lines(), f"FAILED: {'; '.join(reasons)}" if reasons else "PASSED"])
    server = {"base_url": target.base_url, "model": target.model}
    report.write(
        {**server, **asdict(settings), **asdict(mix), **result.as_dict(), "failed": reasons}
    )
    return 1 if reasons else 0


async def soak(target: Target, settings: SoakSettings, mix: Mix) -> SoakResult:
    """Put the load on the server. The target must name a model if an API of `mix` needs it."""
    async with Client(target) as client:
        mix = await _with_server_limits(client, mix)
        run = _Soak(
            client,
            settings,
            [mix.request(number) for number in range(settings.num_requests)],
            mix.seed,
        )
        await run.ask_alone(_sample(run.requests, settings.verify, mix.seed))
        await run.load()
        await run.settle()
    return run.result


async def _with_server_limits(client: Client, mix: Mix) -> Mix:
    """Return `mix` with the vocabulary of the server, and with prompts that fit its context."""
    try:
        info = await client.get_json("/get_model_info")
        vocab_size, context = info.get("vocab_size"), info.get("context_length")
    except (RequestFailed, AttributeError):
        return mix
    if isinstance(context, int):
        # Rare words may take several tokens, and a chat template some more.
        room = (context - mix.max_new_tokens) // 2
        if room < 1:
            raise ValueError(
                f"--max-new-tokens {mix.max_new_tokens} leaves no room for a prompt in a context "
                f"of {context} tokens"
            )
        mix = replace(mix, max_prompt_words=min(mix.max_prompt_words, room))
    return replace(mix, vocab_size=mix.vocab_size or vocab_size)


def _sample(requests: list[SoakRequest], count: int, seed: int) -> list[int]:
    """Return numbers of requests that are read to their end and have a determined answer."""
    eligible = [
        number
        for number, request in enumerate(requests)
        if request.deterministic and request.fate is Fate.READ
    ]
    return sorted(random.Random(seed).sample(eligible, min(count, len(eligible))))


class _Soak:
    """A running soak."""

    def __init__(
        self, client: Client, settings: SoakSettings, requests: list[SoakRequest], seed: int
    ) -> None:
        self.requests = requests
        self.result = SoakResult()
        self._client = client
        self._settings = settings
        self._seed = seed
        self._alone: dict[int, Answer] = {}

    async def ask_alone(self, numbers: list[int]) -> None:
        """Send these requests one by one, for comparison."""
        for number in progress_bar(numbers, desc="alone", unit="request"):
            request = self.requests[number]
            with contextlib.suppress(Refused):  # A refused request is not compared.
                answer = await self._read(number, request)
                if answer is not None:
                    self._alone[number] = answer

    async def load(self) -> None:
        """Send all requests while memory and queue are watched. Repeat until all faults are done
        and the duration is over.
        """
        end = time.monotonic() + self._settings.duration
        watches = [
            asyncio.create_task(each) for each in (self._watch_memory(), self._watch_queue())
        ]
        faults = asyncio.create_task(self._commit_faults())
        await self._load_once()
        while not faults.done() or time.monotonic() < end:
            await self._load_once()
        await faults
        for watch in watches:
            watch.cancel()

    async def _load_once(self) -> None:
        with progress_bar(total=len(self.requests), desc="load", unit="request") as bar:

            async def send(number: int) -> None:
                outcome = await self._send(number)
                self.result.outcomes[outcome] += 1
                bar.update()

            await run_load(range(len(self.requests)), send, concurrency=self._settings.concurrency)

    async def _commit_faults(self) -> None:
        settings = self._settings
        if settings.server_pid is None:
            return
        faults = Faults(
            server_pid=settings.server_pid,
            kills=settings.kills,
            hangs=settings.hangs,
            interval=settings.fault_interval,
            seed=self._seed,
        )
        try:
            await faults.commit(self._serves, lambda kind: self.result.faults.update([kind]))
        except (TimeoutError, psutil.Error) as error:
            self.result.failures.add(
                RequestFailed("the server did not survive a fault of its engine", repr(error))
            )

    async def _serves(self) -> bool:
        try:
            await self._client.get("/health")
        except RequestFailed:
            return False
        return True

    async def settle(self) -> None:
        """Wait until the server is idle, and note its state and memory.

        First request a single token, because a server may report the figures of its last step.
        """
        try:
            await ask(self._client, GenerationCall(prompt="Hi", max_tokens=1))
            self.result.state = await wait_idle(self._client, self._settings.settle_seconds)
        except RequestFailed as error:
            self.result.failures.add(error)
        self._note_memory()

    async def _watch_memory(self) -> None:
        while self._note_memory():
            await asyncio.sleep(_WATCH_SECONDS)

    async def _watch_queue(self) -> None:
        result = self.result
        while True:
            # The server does not answer while its engine restarts.
            with contextlib.suppress(RequestFailed):
                state = await read_state(self._client)
                if state is not None:
                    result.most_under_way = max(
                        result.most_under_way or 0, state.running + state.queued
                    )
            await asyncio.sleep(_WATCH_SECONDS)

    def _note_memory(self) -> bool:
        """Note the memory. Return false if there is no process to watch."""
        pid = self._settings.server_pid
        if pid is None:
            return False
        try:
            self.result.memory.append(resident_bytes(pid))
        except ValueError as error:
            self.result.failures.add(RequestFailed("the server's process is gone", str(error)))
            return False
        return True

    async def _send(self, number: int) -> str:
        """Send one request and return its outcome."""
        try:
            return await self._meet_fate(number, self.requests[number])
        except Refused as refusal:
            await asyncio.sleep(float(str(refusal)))
            return "refused"

    async def _meet_fate(self, number: int, request: SoakRequest) -> str:
        match request.fate:
            case Fate.READ:
                answer = await self._read(number, request)
                self._compare(number, answer)
            case Fate.DISCONNECT:
                try:
                    async with asyncio.timeout(request.wait):
                        answer = await self._read(number, request)
                except TimeoutError:
                    return "disconnected"
            case Fate.ABORT:
                answer = await self._read_aborted(number, request)
        if answer is None:
            return "failed"
        return "aborted" if answer.unfinished else "answered"

    async def _read(
        self,
        number: int,
        request: SoakRequest,
        *,
        rid: str | None = None,
        watch: Any = lambda answer: None,
    ) -> Answer | None:
        """Return the checked answer, or None if the request failed."""
        call = replace(request.call, rid=rid or uuid.uuid4().hex)
        try:
            answer = await ask(
                self._client,
                call,
                api=request.api,
                watch=watch,
                allow_abort=request.fate is Fate.ABORT,
            )
        except RequestFailed as error:
            if self._settings.overload and error.status in _REFUSALS:
                self._check_refusal(error)
            self.result.failures.add(error)
            if error.reason == MALFORMED:
                self.result.problems.append(f"request {number} ({request.api}): {error}")
            return None
        self.result.problems += [
            f"request {number} ({request.api}): {problem}" for problem in problems(request, answer)
        ]
        return answer

    def _check_refusal(self, error: RequestFailed) -> None:
        """Raise `Refused` if the answer says when to try again; else note a failure."""
        if error.retry_after is not None and error.retry_after.isdecimal():
            raise Refused(min(float(error.retry_after), _LONGEST_PAUSE))
        self.result.problems.append(f"{error.reason} without Retry-After")

    async def _read_aborted(self, number: int, request: SoakRequest) -> Answer | None:
        """Read the answer while another task aborts the request."""
        rid = uuid.uuid4().hex
        known: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if request.api is Api.GENERATE:
            known.set_result(rid)

        def learn_id(answer: Answer) -> None:
            if not known.done() and answer.request_id is not None:
                known.set_result(answer.request_id)

        abort = asyncio.create_task(self._abort(request.wait, known))
        try:
            return await self._read(number, request, rid=rid, watch=learn_id)
        finally:
            abort.cancel()
            await asyncio.gather(abort, return_exceptions=True)

    async def _abort(self, wait: float, request_id: asyncio.Future[str]) -> None:
        await asyncio.sleep(wait)
        try:
            await self._client.post(ABORT_PATH, {"rid": await request_id})
        except RequestFailed as error:
            self.result.failures.add(RequestFailed(f"{ABORT_PATH}: {error.reason}", error.detail))

    def _compare(self, number: int, answer: Answer | None) -> None:
        alone = self._alone.get(number)
        if alone is None or answer is None:
            return
        self.result.verified += 1
        if (alone.texts, alone.finish_reasons) != (answer.texts, answer.finish_reasons):
            differing = next(
                ((a, b) for a, b in zip(alone.texts, answer.texts, strict=True) if a != b), ("", "")
            )
            self.result.mismatches.append(
                f"request {number}: alone {_around(*differing)}, under load "
                f"{_around(*reversed(differing))}"
            )


def _around(text: str, other: str) -> str:
    """Return the part of `text` around the place where `other` differs."""
    same = next(
        (at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b),
        min(len(text), len(other)),
    )
    return repr(text[max(0, same - 20) : same + 20])
