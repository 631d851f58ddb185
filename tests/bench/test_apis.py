"""Calls and answers in the three formats, over real HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from scripted_server import ScriptedServer

from piecework.bench.apis import Answer, GenerationCall, ask
from piecework.bench.client import Client, RequestFailed, ServerUnusable, resolve
from piecework.bench.target import Api, Target

CALL = GenerationCall(prompt="a b c", max_tokens=10)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
every_api = pytest.mark.parametrize("api", list(Api))


def answer_of(
    server: ScriptedServer,
    api: Api,
    call: GenerationCall,
    *,
    timeout: float = 5.0,
    allow_abort: bool = False,
) -> Answer:
    async def run() -> Answer:
        async with Client(
            await resolve(Target(base_url=server.url, api=api, timeout=timeout))
        ) as client:
            return await ask(client, call, allow_abort=allow_abort)

    return asyncio.run(run())


def failure_of(
    server: ScriptedServer, api: Api, call: GenerationCall, *, timeout: float = 5.0
) -> RequestFailed:
    with pytest.raises(RequestFailed) as failed:
        answer_of(server, api, call, timeout=timeout)
    return failed.value


@both_ways
@every_api
def test_text_counts_and_finish_reason(server: ScriptedServer, api: Api, stream: bool) -> None:
    answer = answer_of(server, api, replace(CALL, stream=stream))
    assert answer.texts == [" one two three 4"]
    assert answer.finish_reasons == ["stop"]
    assert (answer.prompt_tokens, answer.completion_tokens) == (3, 4)
    assert not answer.retracted


@both_ways
@every_api
def test_samples_are_kept_apart(server: ScriptedServer, api: Api, stream: bool) -> None:
    answer = answer_of(server, api, replace(CALL, n=3, logprobs=0, max_tokens=2, stream=stream))
    assert answer.texts == [" one two"] * 3
    assert answer.finish_reasons == ["length"] * 3
    assert answer.completion_tokens == 6
    assert answer.logprobs == [[-0.5, -0.5]] * 3


@every_api
def test_streams_are_read_across_chunk_borders(server: ScriptedServer, api: Api) -> None:
    server.reply = lambda prompt: "grüße 🙂 " * 3
    whole = answer_of(server, api, CALL)
    for size in (1, 3, 17):
        server.chunk_bytes = size
        assert answer_of(server, api, replace(CALL, stream=True)).texts == whole.texts


@every_api
def test_each_event_with_tokens_has_a_time(server: ScriptedServer, api: Api) -> None:
    server.delay = 0.02
    answer = answer_of(server, api, replace(CALL, stream=True))
    assert len(answer.token_times) == 4
    # What the machine does meanwhile can only make them later.
    assert all(
        time - answer.sent >= 0.019 * tokens for tokens, time in enumerate(answer.token_times, 1)
    )
    assert sorted(answer.token_times) == answer.token_times
    assert answer.ended >= answer.token_times[-1]


def test_a_role_or_an_end_is_no_token(server: ScriptedServer) -> None:
    """A chat's first chunk tells the role alone, and the last of every format the finish reason."""
    server.reply = lambda prompt: ""
    for api in Api:
        assert answer_of(server, api, replace(CALL, stream=True)).token_times == []


@every_api
def test_parameters_reach_the_server_under_its_names(server: ScriptedServer, api: Api) -> None:
    call = replace(CALL, stop=("x", "y"), seed=7, n=2, ignore_eos=True, temperature=0.5, logprobs=3)
    answer_of(server, api, call)
    _, body = server.requests[0]
    sampling = body["sampling_params"] if api is Api.GENERATE else body
    length, seed = (
        ("max_new_tokens", "sampling_seed") if api is Api.GENERATE else ("max_tokens", "seed")
    )
    expected: dict[str, Any] = {
        "stop": ["x", "y"],
        length: 10,
        seed: 7,
        "n": 2,
        "ignore_eos": True,
        "temperature": 0.5,
    }
    assert expected.items() <= sampling.items()
    logprobs = {"completion": {"logprobs": 3}, "chat": {"logprobs": True, "top_logprobs": 3}}
    assert (
        logprobs.get(api, {"return_logprob": True, "top_logprobs_num": 3}).items() <= body.items()
    )


@every_api
def test_what_is_not_asked_for_is_not_sent(server: ScriptedServer, api: Api) -> None:
    """Strict servers refuse parameters that they do not know."""
    answer_of(server, api, CALL)
    _, body = server.requests[0]
    names = (
        {"text", "sampling_params"}
        if api is Api.GENERATE
        else {"model", "max_tokens", "temperature"}
    )
    assert set(body) - {"prompt", "messages"} == names


@pytest.mark.parametrize("api", [Api.COMPLETION, Api.GENERATE])
def test_token_ids_are_sent_as_they_are(server: ScriptedServer, api: Api) -> None:
    answer = answer_of(server, api, replace(CALL, prompt=[5, 6, 7, 8]))
    assert answer.prompt_tokens == 4
    assert [5, 6, 7, 8] in server.requests[0][1].values()


@both_ways
@every_api
def test_an_answer_that_the_server_gave_up_is_a_failure(
    server: ScriptedServer, api: Api, stream: bool
) -> None:
    server.bend = lambda data: _with_finish(data, "abort")
    call = replace(CALL, stream=stream)
    assert failure_of(server, api, call).reason == "given up by the server"
    assert answer_of(server, api, call, allow_abort=True).unfinished


def _with_finish(data: Any, reason: str) -> Any:
    for choice in data.get("choices", []):
        choice["finish_reason"] = choice["finish_reason"] and reason
    if "meta_info" in data:
        data["meta_info"]["finish_reason"] = data["meta_info"]["finish_reason"] and {"type": reason}
    return data


def _without(*path: Any) -> Any:
    def bend(data: Any) -> Any:
        at = data
        for name in path[:-1]:
            if not at.get("choices", True):
                return data
            at = at[name][0] if name == "choices" else at[name]
        del at[path[-1]]
        return data

    return bend


def _everywhere(**members: Any) -> Any:
    return lambda data: {**data, "choices": [{**choice, **members} for choice in data["choices"]]}


@pytest.mark.parametrize(
    ("api", "stream", "bend"),
    [
        (Api.COMPLETION, False, _without("choices", "text")),
        (Api.COMPLETION, False, _without("choices")),
        (Api.COMPLETION, False, lambda data: []),
        (Api.COMPLETION, False, lambda data: {**data, "choices": data["choices"] * 2}),
        (Api.COMPLETION, False, lambda data: {**data, "choices": []}),
        (
            Api.COMPLETION,
            False,
            lambda data: {
                **data,
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 3},
            },
        ),
        (Api.COMPLETION, False, _everywhere(index=1)),
        (Api.COMPLETION, True, _everywhere(finish_reason=None)),
        (Api.COMPLETION, True, _everywhere(finish_reason="stop")),
        (Api.COMPLETION, True, _everywhere(text=3)),
        (Api.CHAT, False, _without("choices", "message")),
        (Api.CHAT, True, _without("choices", "delta")),
        (Api.GENERATE, False, _without("meta_info", "completion_tokens")),
        (Api.GENERATE, True, lambda data: {**data, "index": 1}),
        (Api.GENERATE, True, _without("text")),
    ],
)
def test_what_is_not_in_the_api_s_form_is_malformed(
    server: ScriptedServer, api: Api, stream: bool, bend: Any
) -> None:
    server.bend = bend
    assert failure_of(server, api, replace(CALL, stream=stream)).reason == "malformed answer"


def test_a_stream_that_takes_text_back_is_marked(server: ScriptedServer) -> None:
    server.bend = lambda data: {**data, "text": data["text"][::-1]}
    assert answer_of(server, Api.GENERATE, replace(CALL, stream=True)).retracted


@both_ways
def test_an_http_error_says_what_the_server_said(server: ScriptedServer, stream: bool) -> None:
    server.fail = lambda number: 503
    error = failure_of(server, Api.COMPLETION, replace(CALL, stream=stream))
    assert (error.reason, error.detail, error.status) == ("HTTP 503", "scripted 503", 503)


def test_an_error_in_a_stream_is_a_failure(server: ScriptedServer) -> None:
    server.bend = lambda data: {"error": {"message": "it broke"}}
    error = failure_of(server, Api.CHAT, replace(CALL, stream=True))
    assert (error.reason, error.detail) == ("error in the stream", "it broke")


@every_api
def test_a_stream_without_its_end_is_a_failure(server: ScriptedServer, api: Api) -> None:
    server.break_after = 2
    assert failure_of(server, api, replace(CALL, stream=True)).reason == "stream ended early"


@both_ways
def test_a_lost_connection_is_a_failure(server: ScriptedServer, stream: bool) -> None:
    server.fail = lambda number: 0
    assert (
        failure_of(server, Api.COMPLETION, replace(CALL, stream=stream)).reason == "connection lost"
    )


@both_ways
def test_a_timeout_is_a_failure(server: ScriptedServer, stream: bool) -> None:
    server.delay = 5.0
    assert (
        failure_of(server, Api.COMPLETION, replace(CALL, stream=stream), timeout=1.5).reason
        == "timeout"
    )


@pytest.mark.parametrize(("keep_alive", "connections"), [(True, 1), (False, 4)])
def test_connections_are_used_again_unless_told_otherwise(
    server: ScriptedServer, keep_alive: bool, connections: int
) -> None:
    async def ask_four_times() -> None:
        async with Client(Target(base_url=server.url, model="m", keep_alive=keep_alive)) as client:
            for stream in (False, True, False, True):
                await ask(client, replace(CALL, stream=stream))

    asyncio.run(ask_four_times())
    assert len(server.connections) == connections


def unusable(**settings: Any) -> str:
    with pytest.raises(ServerUnusable) as error:
        asyncio.run(resolve(Target(**settings)))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_model_is_the_one_asked_for_or_the_first_listed(server: ScriptedServer) -> None:
    assert asyncio.run(resolve(Target(base_url=server.url))).model == "scripted"
    assert asyncio.run(resolve(Target(base_url=server.url, model="mine"))).model == "mine"
    assert asyncio.run(resolve(Target(base_url=server.url, api=Api.GENERATE))).model is None


def test_a_server_that_cannot_be_used_is_told_in_one_line(
    server: ScriptedServer, nobody: str
) -> None:
    assert nobody in unusable(base_url=nobody)
    server.key = "secret"
    assert "--api-key" in unusable(base_url=server.url)
    assert asyncio.run(resolve(Target(base_url=server.url, api_key="secret"))).model == "scripted"
    server.key, server.missing = None, {"/v1/models"}
    assert "404" in unusable(base_url=server.url)
    assert asyncio.run(resolve(Target(base_url=server.url, model="mine"))).model == "mine"


@pytest.mark.parametrize("url", ["", "localhost:30000", "ftp://x", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no URL"):
        Target(base_url=url)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_base_url_may_be_written_as_clients_want_it(end: str) -> None:
    assert Target(base_url="http://h:1" + end).base_url == "http://h:1"
