"""Endpoints that stop the engine and change its weights: off by default, and within one folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from http_fixtures import client_of, error_of, make_app
from scripted_engine import ScriptedEngine

from piecework.runtime.core.control_messages import (
    Pause,
    ReadWeights,
    Resume,
    Sleep,
    UpdateWeights,
    WakeUp,
)

STOPS = [
    ("/sleep", None, Sleep(level=1)),
    ("/sleep?level=2", None, Sleep(level=2)),
    ("/wake_up", None, WakeUp()),
    ("/release_memory_occupation", {}, Sleep(level=1)),
    ("/resume_memory_occupation", {"tags": ["kv_cache", "weights"]}, WakeUp()),
    ("/pause_generation", {}, Pause(retract=True)),
    ("/pause_generation", {"mode": "in_place"}, Pause(retract=False)),
    ("/continue_generation", {}, Resume()),
]


async def test_each_endpoint_is_off_by_default(
    scripted: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ScriptedEngine, "abort")  # No request may end.
    async with client_of(make_app(scripted)) as client:
        for path, body, _ in STOPS:
            error = error_of(await client.post(path, json=body), 400)
            assert "--enable-sleep-mode" in error["message"]
        for path, body in (
            ("/update_weights_from_disk", {"model_path": str(tmp_path)}),
            ("/get_weights_by_name", {"name": "model.norm.weight"}),
        ):
            assert "--weights-root" in error_of(await client.post(path, json=body), 400)["message"]
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
    assert not scripted.controls


async def test_the_engine_gets_what_was_asked(scripted: ScriptedEngine, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    app = make_app(scripted, enable_sleep_mode=True, weights_root=str(tmp_path))
    async with client_of(app) as client:
        for path, body, message in STOPS:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200 and answer.json()["freed_bytes"] == 7
            assert scripted.controls[-1] == message
        body = {"model_path": "new", "weight_version": "step-7", "flush_running": True}
        assert (await client.post("/update_weights_from_disk", json=body)).json()["success"]
        assert scripted.controls[-1] == UpdateWeights(
            model_path=str(tmp_path / "new"), at_once=True
        )
        about = (await client.get("/model_info")).json()
        assert about["weight_version"] == "step-7" and about["model_path"] == str(tmp_path / "new")
        numbers = await client.post("/get_weights_by_name", json={"name": "a", "truncate_size": 2})
        assert numbers.json() == [0.5, 0.25]
        assert scripted.controls[-1] == ReadWeights(name="a", count=2)
        scripted.control_error = "the engine sleeps already"
        assert "sleeps already" in error_of(await client.post("/sleep"), 400)["message"]


async def test_requests_end_only_where_that_was_asked(
    scripted: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str | None] = []

    async def abort(rid: str | None) -> int:
        ended.append(rid)
        return 0

    monkeypatch.setattr(scripted, "abort", abort)
    (tmp_path / "new").mkdir()
    app = make_app(scripted, enable_sleep_mode=True, weights_root=str(tmp_path))
    async with client_of(app) as client:
        for path, body, count in (
            ("/pause_generation", {"mode": "retract"}, 0),
            ("/pause_generation", {"mode": "in_place"}, 0),
            ("/pause_generation", {"mode": "abort"}, 1),
            ("/update_weights_from_disk", {"model_path": "new"}, 1),
            ("/update_weights_from_disk", {"model_path": "new", "abort_all_requests": True}, 2),
        ):
            assert (await client.post(path, json=body)).status_code == 200
            assert ended == [None] * count


@pytest.mark.parametrize("path", ["..", "/etc", "../../etc/passwd", "missing", "a\0b", "link"])
async def test_no_model_outside_of_the_folder_is_loaded(
    scripted: ScriptedEngine, tmp_path: Path, path: str
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    async with client_of(make_app(scripted, weights_root=str(root))) as client:
        answer = await client.post("/update_weights_from_disk", json={"model_path": path})
        error_of(answer, 400, "model_path")
    assert not scripted.controls


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/sleep?level=3", None, "level"),
        ("/release_memory_occupation", {"tags": ["weights"]}, "tags"),
        ("/pause_generation", {"mode": "stop"}, "mode"),
        ("/get_weights_by_name", {"name": "a", "truncate_size": 10**9}, "truncate_size"),
        ("/update_weights_from_disk", {}, "model_path"),
    ],
)
async def test_a_wrong_body_names_its_parameter(
    scripted: ScriptedEngine, tmp_path: Path, path: str, body: object, param: str
) -> None:
    app = make_app(scripted, enable_sleep_mode=True, weights_root=str(tmp_path))
    async with client_of(app) as client:
        error_of(await client.post(path, json=body), 400, param)
