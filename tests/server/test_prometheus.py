"""docker/observability, held to Debian's prometheus and to a server under load."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fleet_fixtures import ScriptedFleet
from http_fixtures import make_app
from scripted_engine import ScriptedEngine
from server_process import free_port, ready
from tiny_models import make_tiny_model

FOLDER = Path(__file__).parents[2] / "docker" / "observability"
RULES = yaml.safe_load((FOLDER / "rules.yml").read_text())
DASHBOARD = json.loads((FOLDER / "grafana/dashboards/piecework.json").read_text())
_SUFFIXES = re.compile(r"_(bucket|sum|count|total)$")


def queries() -> list[str]:
    """What the dashboard's panels ask, with its variables filled in."""
    panels = DASHBOARD["panels"]
    return [filled_in(target["expr"]) for panel in panels for target in panel["targets"]]


def filled_in(query: str) -> str:
    for name, value in (("$__rate_interval", "20s"), ("$model", ".*"), ("$instance", ".*")):
        query = query.replace(name, value)
    return query


def rules() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def named_metrics() -> set[str]:
    """Of dashboard and rules, without the suffixes that Prometheus knows."""
    text = " ".join([*queries(), *(rule["expr"] for rule in rules())])
    return {_SUFFIXES.sub("", name) for name in re.findall(r"(?<![\w:])piecework:\w+", text)}


async def test_each_metric_that_is_named_is_one_of_the_server_s(
    scripted: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = ScriptedFleet(tmp_path, monkeypatch).service("a").app
    exposed = "".join(
        app.state.serving.metrics.exposition().decode() for app in (make_app(scripted), several)
    )
    families = re.findall(r"^# TYPE (piecework:\w+) ", exposed, re.M)
    assert named_metrics() <= {_SUFFIXES.sub("", name) for name in families}


def test_each_recorded_series_that_is_asked_for_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = {name for rule in rules() for name in re.findall(r"\bmodel:\w+:\w+", rule["expr"])}
    assert asked <= recorded


def test_panels_do_not_lie_on_one_another() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="apt-get install prometheus")
@pytest.mark.parametrize(
    "check", [("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")]
)
def test_promtool(check: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *check], cwd=FOLDER, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """Debian's, with our configuration, asking `target` each second."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(FOLDER / "rules.yml", folder)
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=error",
        ],
        stderr=subprocess.PIPE,
    )
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=10) as client:
            yield client
    finally:
        process.terminate()
        process.communicate(timeout=30)


def values(client: httpx.Client, query: str) -> list[float]:
    answer = client.get("/api/v1/query", params={"query": query}).raise_for_status().json()
    return [float(one["value"][1]) for one in answer["data"]["result"]]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt-get install prometheus")
def test_dashboard_and_rules_have_data_of_a_server_under_load(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path, "qwen3"))
    flags = ("--max-queued-requests", "2", "--max-running-requests", "2")
    ended = threading.Event()
    with (
        ready(model, *flags) as server,
        prometheus(tmp_path, f"127.0.0.1:{server.port}") as client,
    ):

        def ask() -> None:
            body = {"prompt": [5, 6, 7] * 12, "max_tokens": 40, "ignore_eos": True}
            while not ended.is_set():
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
                ended.wait(0.01)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        try:
            recorded = [rule["record"] for rule in rules() if "record" in rule]
            wanted = {*queries(), *recorded}
            end = time.monotonic() + 60
            while wanted and time.monotonic() < end:
                time.sleep(1)
                for query in sorted(wanted):
                    with_data = _answered(client, query)
                    if with_data:
                        wanted.discard(query)
            assert wanted == set()
            told = client.get("/api/v1/rules").json()["data"]["groups"]
            assert all(rule["health"] == "ok" for group in told for rule in group["rules"])
            (target,) = client.get("/api/v1/targets").json()["data"]["activeTargets"]
            assert target["health"] == "up", target
        finally:
            ended.set()
            for thread in threads:
                thread.join(30)


def _answered(client: httpx.Client, query: str) -> bool:
    try:
        found = values(client, query)
    except httpx.HTTPError:
        return False
    return any(not math.isnan(value) for value in found)
