"""`/start_profile`, `/stop_profile`: nowhere but below the operator's folder, and real traces."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from http_fixtures import client_of, error_of, make_app
from scripted_engine import ScriptedEngine
from tiny_models import make_tiny_model

from piecework.runtime.core.messages import ProfileAnswer, StartProfile, StopProfile
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.profiling import Profiler
from piecework.runtime.llm import LLM
from piecework.server.native import profiling


@pytest.fixture
async def profiled(scripted: ScriptedEngine, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app(scripted, profile_dir=str(tmp_path / "traces"))) as client:
        yield client


async def test_off_unless_there_is_a_folder(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    for path in ("/start_profile", "/stop_profile"):
        assert "--profile-dir" in error_of(await client.post(path), 400)["message"]
    assert scripted.profiles == []


@pytest.mark.parametrize(
    ("body", "folder", "members"),
    [
        (None, "", {"num_steps": None, "activities": ["CPU", "GPU"]}),
        ({"output_dir": "a/b", "num_steps": 3}, "a/b", {"num_steps": 3}),
        ({"activities": ["CPU"], "with_stack": True}, "", {"activities": ["CPU"]}),
    ],
)
async def test_what_the_engine_is_told(
    profiled: httpx.AsyncClient,
    scripted: ScriptedEngine,
    tmp_path: Path,
    body: Any,
    folder: str,
    members: dict[str, Any],
) -> None:
    answer = (
        await profiled.post("/start_profile", json=body)
        if body
        else await profiled.post("/start_profile")
    )
    assert answer.json()["paths"] == ["/traces/1.trace.json.gz"]
    assert (await profiled.post("/stop_profile")).status_code == 200
    start, stop = scripted.profiles
    assert isinstance(start, StartProfile) and isinstance(stop, StopProfile)
    assert Path(start.folder) == tmp_path / "traces" / folder
    assert {name: getattr(start, name) for name in members} == members


@pytest.mark.parametrize(
    "wrong",
    [
        {"output_dir": "../x"},
        {"output_dir": "/etc"},
        {"output_dir": "a\0b"},
        {"output_dir": "out/x"},
        {"num_steps": 0},
        {"num_steps": 10**6},
        {"activities": ["RPD"]},
        {"activities": []},
        {"profile_by_stage": True},
    ],
)
async def test_what_would_write_elsewhere_or_without_end_is_refused(
    profiled: httpx.AsyncClient, scripted: ScriptedEngine, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "out").symlink_to(tmp_path)
    (name,) = wrong
    answer = await profiled.post("/start_profile", json=wrong)
    assert (answer.json()["error"]["param"] or "").startswith(name)
    assert answer.status_code == 400 and scripted.profiles == []


async def test_a_full_folder_takes_no_more(
    profiled: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "old").write_bytes(b"x" * 11)
    monkeypatch.setattr(profiling, "_MOST_BYTES", 10)
    assert "delete" in error_of(await profiled.post("/start_profile"), 400)["message"]


async def test_a_trace_that_gets_its_name_meanwhile_is_no_fault(
    profiled: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    listed = [(str(folder), [], ["gone.part.trace.json.gz"])]
    monkeypatch.setattr(os, "walk", lambda root: iter(listed))
    assert (await profiled.post("/start_profile")).status_code == 200


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
async def test_a_body_that_is_left_out_has_no_type(profiled: httpx.AsyncClient, kind: str) -> None:
    """Python's urllib and `curl -d ''` send the first."""
    answer = await profiled.post("/start_profile", headers={"content-type": kind})
    assert answer.status_code == 200, answer.text
    answer = await profiled.post("/start_profile", headers={"content-type": kind}, content=b"{}")
    assert answer.status_code == 415


async def test_engines_that_have_ended_theirs_do_not_hide_the_others(
    profiled: httpx.AsyncClient, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [ProfileAnswer(error="no profile is running"), ProfileAnswer(path="/traces/2")]

    async def profile(message: Any) -> list[ProfileAnswer]:
        return told

    monkeypatch.setattr(scripted, "profile", profile)
    answer = (await profiled.post("/stop_profile")).json()
    assert answer["paths"] == ["/traces/2"] and "no profile is running" in answer["message"]
    told.pop()
    assert (await profiled.post("/stop_profile")).status_code == 400


def test_a_trace_of_a_model_s_steps(tmp_path: Path) -> None:
    llm = LLM(str(make_tiny_model(tmp_path, "qwen3")), dtype="float32", max_total_tokens=64)
    started = llm.start_profile(str(tmp_path / "traces"), num_steps=50)
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=2))
    assert llm.stop_profile() == started
    with gzip.open(started) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert any("piecework::attention" in str(name) for name in names)
    with pytest.raises(ValueError, match="no profile is running"):
        llm.stop_profile()


def test_a_profile_ends_after_its_steps_and_leaves_no_part(tmp_path: Path) -> None:
    profiler = Profiler()
    asked = StartProfile(folder=str(tmp_path), num_steps=2, activities=["CPU"])
    path = profiler.start(asked).path
    assert "running" in (profiler.start(asked).error or "")
    profiler.step()
    assert profiler.is_running
    profiler.step()
    profiler.wait()
    assert not profiler.is_running
    assert [str(each) for each in tmp_path.iterdir()] == [path]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = Profiler().start(StartProfile(folder=str(tmp_path / "file" / "x")))
    assert "cannot start" in (answer.error or "")


def test_a_machine_without_a_gpu_says_so(tmp_path: Path) -> None:
    answer = Profiler().start(StartProfile(folder=str(tmp_path), activities=["GPU"]))
    assert torch.accelerator.is_available() or "no GPU" in (answer.error or "")
