"""Three request formats: OpenAI's completions and chat completions, and SGLang's `/generate`."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from .client import MALFORMED, Client, RequestFailed
from .target import Api

UNFINISHED = ("abort", "error")  # Finish reasons of sequences that the server gave up.


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """A request, independent of the format."""

    prompt: str | list[int]  # Text or token ids. A chat takes text only.
    max_tokens: int
    temperature: float = 0.0
    stop: tuple[str, ...] = ()
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None  # k: those of the tokens and of the k likeliest tokens.
    ignore_eos: bool = False
    stream: bool = False
    rid: str | None = None  # Request id, for `/generate` only.
    images: tuple[str, ...] = ()  # Addresses of images before the prompt, for chats only.
    adapter: str | None = None  # Name of an adapter (LoRA) of the model.


@dataclass(slots=True)
class Answer:
    """The answer to a call with `n` sequences. Times are `time.perf_counter()` seconds.

    Token counts are the server's. They are None if the server does not send them.
    """

    n: int = 1
    texts: list[str] = field(init=False)
    finish_reasons: list[str | None] = field(init=False)
    logprobs: list[list[float]] = field(init=False)  # [sequence][token]
    sequence_tokens: list[int] = field(init=False)  # Only `/generate` tells these.
    request_id: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    sent: float = 0.0
    # Arrival of each event with new tokens; empty if the answer was not streamed.
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    retracted: bool = False  # Whether a stream removed text that it had sent.

    def __post_init__(self) -> None:
        self.texts = [""] * self.n
        self.finish_reasons = [None] * self.n
        self.logprobs = [[] for _ in range(self.n)]
        self.sequence_tokens = [0] * self.n

    def check_open(self, index: int) -> None:
        """Raise `RequestFailed` if there is no sequence `index`, or if it has ended."""
        if not 0 <= index < self.n:
            raise RequestFailed(MALFORMED, f"index {index} of {self.n} choices")
        if self.finish_reasons[index] is not None:
            raise RequestFailed(MALFORMED, f"choice {index} goes on after its finish reason")

    def check_complete(self) -> None:
        """Raise `RequestFailed` if a sequence has not ended."""
        if None in self.finish_reasons:
            raise RequestFailed(
                MALFORMED, f"choice {self.finish_reasons.index(None)} has no finish reason"
            )

    @property
    def unfinished(self) -> bool:
        """Whether the server gave up a sequence."""
        return any(reason in UNFINISHED for reason in self.finish_reasons)


class Format(ABC):
    """An endpoint: how to write a call and how to read an answer, whole or streamed.

    The methods that read raise KeyError, IndexError, TypeError or ValueError if the data is
    malformed. `ask` turns these into `RequestFailed`.
    """

    path: str

    @abstractmethod
    def body(self, call: GenerationCall, model: str | None) -> dict[str, Any]:
        """Return the JSON to send."""

    @abstractmethod
    def read(self, data: Any, answer: Answer) -> None:
        """Add a whole answer to `answer`."""

    @abstractmethod
    def read_event(self, data: Any, answer: Answer) -> bool:
        """Add one event to `answer`. Return whether the event had tokens."""


class _OpenAI(Format):
    def body(self, call: GenerationCall, model: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": call.adapter or model,
            **self._prompt(call),
            "max_tokens": call.max_tokens,
            "temperature": call.temperature,
        }
        body |= _asked_for(call, seed="seed")
        if call.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def read(self, data: Any, answer: Answer) -> None:
        answer.request_id = data["id"]
        for choice in data["choices"]:
            self._read_choice(choice, answer)
        self._read_usage(data, answer)

    def read_event(self, data: Any, answer: Answer) -> bool:
        answer.request_id = data["id"]
        self._read_usage(data, answer)
        brought_tokens = False
        for choice in data["choices"]:
            brought_tokens |= self._read_choice(choice, answer)
        return brought_tokens

    def _read_choice(self, choice: Any, answer: Answer) -> bool:
        index: int = choice["index"]
        answer.check_open(index)
        text = self._text(choice)
        answer.texts[index] += text
        answer.finish_reasons[index] = choice["finish_reason"]
        logprobs = choice.get("logprobs")
        if logprobs is not None:
            answer.logprobs[index] += self._logprobs(logprobs)
        return self._brings_tokens(choice, text)

    @staticmethod
    def _read_usage(data: Any, answer: Answer) -> None:
        usage = data.get("usage")
        if usage is not None:
            answer.prompt_tokens, answer.completion_tokens = (
                usage["prompt_tokens"],
                usage["completion_tokens"],
            )
            _require(
                usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"],
                f"the usage does not add up: {usage}",
            )

    @abstractmethod
    def _prompt(self, call: GenerationCall) -> dict[str, Any]: ...

    @abstractmethod
    def _text(self, choice: Any) -> str: ...

    @abstractmethod
    def _logprobs(self, logprobs: Any) -> list[float]: ...

    @abstractmethod
    def _brings_tokens(self, choice: Any, text: str) -> bool: ...


class _Completion(_OpenAI):
    path = "/v1/completions"

    def _prompt(self, call: GenerationCall) -> dict[str, Any]:
        prompt = {"prompt": call.prompt}
        return prompt if call.logprobs is None else {**prompt, "logprobs": call.logprobs}

    def _text(self, choice: Any) -> str:
        text: str = choice["text"]
        return text

    def _logprobs(self, logprobs: Any) -> list[float]:
        values: list[float] = logprobs["token_logprobs"]
        _require(
            len(logprobs["tokens"]) == len(values),
            "logprobs: as many tokens as token_logprobs are needed",
        )
        return values

    def _brings_tokens(self, choice: Any, text: str) -> bool:
        # Some servers send an empty text for a token without visible text. The last event may have
        # a finish reason and no token.
        return bool(text) or choice["finish_reason"] is None


class _Chat(_OpenAI):
    path = "/v1/chat/completions"

    def _prompt(self, call: GenerationCall) -> dict[str, Any]:
        if not isinstance(call.prompt, str):
            raise ValueError("a chat takes text, not token ids")
        images = [{"type": "image_url", "image_url": {"url": url}} for url in call.images]
        text: Any = call.prompt
        content = [*images, {"type": "text", "text": text}] if images else text
        messages = {"messages": [{"role": "user", "content": content}]}
        return (
            messages
            if call.logprobs is None
            else {**messages, "logprobs": True, "top_logprobs": call.logprobs}
        )

    def _text(self, choice: Any) -> str:
        message = choice["delta"] if "delta" in choice else choice["message"]
        # Reasoning models send their thoughts in a field of its own.
        return (message.get("reasoning_content") or "") + (message.get("content") or "")

    def _logprobs(self, logprobs: Any) -> list[float]:
        return [entry["logprob"] for entry in logprobs["content"] or ()]

    def _brings_tokens(self, choice: Any, text: str) -> bool:
        return bool(text)


class _Generate(Format):
    path = "/generate"

    def body(self, call: GenerationCall, model: str | None) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "max_new_tokens": call.max_tokens,
            "temperature": call.temperature,
        }
        sampling |= _asked_for(call, seed="sampling_seed")
        body: dict[str, Any] = {
            "text" if isinstance(call.prompt, str) else "input_ids": call.prompt,
            "sampling_params": sampling,
        }
        if call.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": call.logprobs}
        if call.rid is not None:
            body["rid"] = call.rid
        if call.adapter is not None:
            body["lora_path"] = call.adapter
        return {**body, "stream": True} if call.stream else body

    def read(self, data: Any, answer: Answer) -> None:
        sequences = data if isinstance(data, list) else [data]
        for index, sequence in enumerate(sequences):
            self._read_sequence(sequence, index, answer)

    def read_event(self, data: Any, answer: Answer) -> bool:
        before = answer.completion_tokens or 0
        self._read_sequence(data, data.get("index", 0), answer)
        return (answer.completion_tokens or 0) > before

    def _read_sequence(self, data: Any, index: int, answer: Answer) -> None:
        """Add one event. Events are cumulative: each holds the whole text so far."""
        answer.check_open(index)
        meta, text = data["meta_info"], data["text"]
        answer.retracted |= not text.startswith(answer.texts[index])
        answer.texts[index] = text
        reason = meta["finish_reason"]
        answer.finish_reasons[index] = None if reason is None else reason["type"]
        answer.request_id = meta["id"]
        answer.prompt_tokens = meta["prompt_tokens"]
        answer.sequence_tokens[index] = meta["completion_tokens"]
        answer.completion_tokens = sum(answer.sequence_tokens)
        entries = meta.get("output_token_logprobs")
        if entries is not None:
            answer.logprobs[index] = [entry[0] for entry in entries]


def _asked_for(call: GenerationCall, *, seed: str) -> dict[str, Any]:
    """Return the parameters that have a value. Others are not sent, because not every server knows
    every parameter.

    `seed` is the name of the seed in this format.
    """
    body: dict[str, Any] = {}
    if call.stop:
        body["stop"] = list(call.stop)
    if call.n > 1:
        body["n"] = call.n
    if call.seed is not None:
        body[seed] = call.seed
    if call.ignore_eos:
        body["ignore_eos"] = True
    return body


FORMATS: dict[Api, Format] = {
    Api.COMPLETION: _Completion(),
    Api.CHAT: _Chat(),
    Api.GENERATE: _Generate(),
}


async def ask(
    client: Client,
    call: GenerationCall,
    *,
    api: Api | None = None,
    watch: Callable[[Answer], None] = lambda answer: None,
    allow_abort: bool = False,
) -> Answer:
    """Send one call and read its answer.

    `api` defaults to the API of the target. `watch` is called after each event of a streamed
    answer. Raises `RequestFailed` for an HTTP error, a lost connection or a malformed answer. An
    answer that the server gave up also raises, unless `allow_abort` is true.
    """
    form, answer = FORMATS[api or client.target.api], Answer(call.n)
    body = form.body(call, client.target.model)
    answer.sent = time.perf_counter()
    if call.stream:
        await _read_stream(client, form, body, answer, watch)
    else:
        data = await client.post(form.path, body)
        answer.ended = time.perf_counter()
        with _as_malformed():
            form.read(data, answer)
    answer.check_complete()
    if answer.unfinished and not allow_abort:
        raise RequestFailed("given up by the server", f"finish reasons {answer.finish_reasons}")
    return answer


async def _read_stream(
    client: Client, form: Format, body: Any, answer: Answer, watch: Callable[[Answer], None]
) -> None:
    async with aclosing(client.events(form.path, body)) as events:
        async for event in events:
            with _as_malformed():
                brought_tokens = form.read_event(event.data, answer)
            if brought_tokens:
                answer.token_times.append(event.time)
            answer.ended = event.time
            watch(answer)
    if not answer.token_times and answer.completion_tokens:
        # None of its tokens showed any text.
        answer.token_times.append(answer.ended)


@contextlib.contextmanager
def _as_malformed() -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise RequestFailed(MALFORMED, f"{type(error).__name__}: {error}") from error


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RequestFailed(MALFORMED, what)
