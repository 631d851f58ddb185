"""Messages survive the wire: what is sent between the processes is what arrives."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.runtime.core.engine_info import EngineInfo, GraphInfo, RankInfo
from piecework.runtime.core.generation import GenerateRequest, TokenLogprob, TokenOutput
from piecework.runtime.core.image_params import DiffusionParams
from piecework.runtime.core.images import Preprocessing
from piecework.runtime.core.messages import (
    CacheFlushed,
    DiffusionInfo,
    DiffusionReady,
    EngineChanged,
    EngineReady,
    EngineStats,
    FromEngine,
    GenerateImage,
    ImageOutput,
    ImageStats,
    ImageStep,
    StartProfile,
    StepOutput,
    ToEngine,
)
from piecework.runtime.core.pooling_messages import (
    PoolingInfo,
    PoolingReady,
    PoolOutput,
    PoolRequest,
    PoolStats,
    PoolStep,
)
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.process.ipc import decode, encode

MESSAGES = [*get_args(ToEngine), *get_args(FromEngine), *get_args(Preprocessing)]
PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(10, 100),
    min_new_tokens=st.integers(0, 10),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.just(-1) | st.integers(1, 100),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    logit_bias=st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
INTEGERS = st.integers(-(2**63), 2**64 - 1)
st.register_type_strategy(int, INTEGERS)  # Those that msgpack can hold.
NUMBERS = st.floats(allow_nan=False)
st.register_type_strategy(float, NUMBERS)  # NaN differs from itself.
LOGPROB = st.builds(
    TokenLogprob,
    token_id=INTEGERS,
    logprob=NUMBERS,
    top=st.lists(st.tuples(INTEGERS, NUMBERS), max_size=3),
)
NUMBERED = st.dictionaries(st.text(max_size=5), INTEGERS, max_size=3)
OUTPUT = st.builds(
    TokenOutput,
    token_ids=st.lists(INTEGERS, max_size=3),
    stop_token_id=st.none() | INTEGERS,
    cached_tokens=INTEGERS,
    loaded=st.tuples(INTEGERS, INTEGERS),
    logprobs=st.none() | st.lists(LOGPROB, max_size=3),
    prompt_logprobs=st.none() | st.lists(st.none() | LOGPROB, max_size=3),
)
GRAPHS = st.builds(
    GraphInfo,
    distinct_pieces=INTEGERS,
    prefill_sizes=st.lists(INTEGERS, max_size=3),
    decode_sizes=st.lists(INTEGERS, max_size=3),
    failed_sizes=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    num_graphs=INTEGERS,
    graph_bytes=INTEGERS,
    capture_seconds=NUMBERS,
)
SHORT = {
    "str": st.text(max_size=5),
    "int": INTEGERS,
    "float": NUMBERS,
    "bool": st.booleans(),
    "bytes": st.binary(max_size=5),
    "str | None": st.none() | st.text(max_size=5),
    "int | None": st.none() | INTEGERS,
    "list[int]": st.lists(INTEGERS, max_size=3),
    "dict[str, str]": st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
}


def built(kind: type[Any], **named: Any) -> st.SearchStrategy[Any]:
    """A dataclass of short values, whose integers msgpack can hold."""
    fields = {field.name: SHORT.get(str(field.type)) for field in dataclasses.fields(kind)}
    known = {name: each for name, each in fields.items() if each is not None}
    return st.builds(kind, **known | named)


STATS = built(EngineStats, graph_fallbacks_total=NUMBERED, accepted_by_position_total=NUMBERED)
INFO = built(
    EngineInfo,
    graphs=GRAPHS,
    ranks=st.lists(built(RankInfo), max_size=3),
    quantization=st.lists(st.text(max_size=5), max_size=3),
    start_seconds=st.dictionaries(st.text(max_size=5), NUMBERS, max_size=3),
)
IMAGE_STATS = built(
    ImageStats,
    stage_seconds_total=st.dictionaries(st.text(max_size=5), NUMBERS, max_size=3),
)
DIFFUSION_INFO = st.builds(
    DiffusionInfo,
    max_running_requests=INTEGERS,
    default_size=st.none() | st.tuples(INTEGERS, INTEGERS),
    default_steps=st.none() | INTEGERS,
    weight_bytes=INTEGERS,
    load_seconds=NUMBERS,
    warm_up_seconds=NUMBERS,
)
IMAGE_PARAMS = st.builds(
    DiffusionParams,
    prompt=st.text(min_size=1, max_size=20).filter(str.strip),
    negative_prompt=st.none() | st.text(max_size=5),
    width=st.none() | st.integers(1, 8192),
    height=st.none() | st.integers(1, 8192),
    num_frames=st.none() | st.integers(1, 1000),
    num_inference_steps=st.none() | st.integers(1, 1000),
    guidance_scale=st.none() | st.floats(0, 100),
    guidance_scale_2=st.none() | st.floats(0, 100),
    seed=INTEGERS,
)
STRATEGIES = {
    GenerateRequest: st.builds(
        GenerateRequest,
        input_ids=st.lists(INTEGERS, max_size=5),
        output_ids=st.lists(INTEGERS, max_size=5),
        params=PARAMS,
        priority=INTEGERS,
        arrival_time=NUMBERS,
        client=st.text(max_size=5),
    ),
    StepOutput: st.builds(
        StepOutput,
        outputs=st.lists(OUTPUT, max_size=3),
        stats=STATS,
        started=st.dictionaries(st.text(max_size=5), NUMBERS, max_size=3),
    ),
    EngineReady: st.builds(EngineReady, info=INFO),
    EngineChanged: st.builds(EngineChanged, info=INFO),
    GenerateImage: st.builds(GenerateImage, params=IMAGE_PARAMS),
    ImageStep: st.builds(
        ImageStep,
        outputs=st.lists(st.builds(ImageOutput, width=INTEGERS, height=INTEGERS), max_size=2),
        stats=IMAGE_STATS,
    ),
    DiffusionReady: st.builds(DiffusionReady, info=DIFFUSION_INFO),
    CacheFlushed: st.builds(CacheFlushed, freed_tokens=INTEGERS),
    StartProfile: built(StartProfile),
    PoolRequest: built(PoolRequest),
    PoolStep: built(
        PoolStep, outputs=st.lists(built(PoolOutput), max_size=2), stats=built(PoolStats)
    ),
    PoolingReady: built(PoolingReady, info=built(PoolingInfo)),
}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_message_comes_through(kind: type, data: st.DataObject) -> None:
    message = data.draw(STRATEGIES.get(kind, st.from_type(kind)))
    assert decode(encode(message)) == message


def test_a_token_costs_few_bytes() -> None:
    """One step of 32 requests: the wire must not be what a step waits for."""
    output = StepOutput(
        outputs=[TokenOutput(rid=f"cmpl-{i:032x}-0", token_ids=[i]) for i in range(32)],
        stats=EngineStats(),
    )
    assert sum(map(len, encode(output))) < 32 * 200
