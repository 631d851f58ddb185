"""Draws what the dashboard's queries give:
`PYTHONPATH=tests python tests/server/dashboard_picture.py PICTURE`.

A server of SmolLM2 is asked by ever more clients, for more than it has places for; a real
Prometheus watches it, and answers each query of docker/observability's dashboard.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from server_process import ready
from test_prometheus import DASHBOARD, filled_in, prometheus

FLAGS = ("--max-running-requests", "8", "--max-queued-requests", "8", "--max-total-tokens", "16k")
CLIENTS = 22
UNITS = {"s": "{x:.3g} s", "percentunit": "{x:.0%}", "bytes": "{x:.0f} MiB", "reqps": "{x:.3g}/s"}


def load(url: str, seconds: float) -> None:
    """A client more every few seconds, each with one request after another."""
    end = time.monotonic() + seconds

    def ask(number: int) -> None:
        body: dict[str, Any] = {"model": "smollm2-135m", "temperature": 1.0}
        system = "You help people who cook. " * 12
        turn = 0
        while time.monotonic() < end:
            turn += 1
            words = f"Client {number}, question {turn}: what goes with rice? " * (1 + turn % 3)
            body["messages"] = [
                {"role": "system", "content": system},
                {"role": "user", "content": words},
            ]
            body["max_tokens"] = (24, 60, 120)[turn % 3]
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
            if answer.status_code == 503:
                time.sleep(1)
            elif answer.is_error:
                raise RuntimeError(answer.text)

    threads = []
    for number in range(CLIENTS):
        threads.append(threading.Thread(target=ask, args=(number,), daemon=True))
        threads[-1].start()
        time.sleep(seconds / 3 / CLIENTS)
    for thread in threads:
        thread.join(seconds + 150)


def answers(client: httpx.Client, query: str, began: float, ended: float) -> list[dict[str, Any]]:
    span = {"query": query, "start": began, "end": ended, "step": 2}
    found = client.get("/api/v1/query_range", params=span).raise_for_status().json()
    result: list[dict[str, Any]] = found["data"]["result"]
    return result


def draw(client: httpx.Client, began: float, ended: float, picture: Path) -> None:
    panels = DASHBOARD["panels"]
    stats = [panel for panel in panels if panel["type"] == "stat"]
    graphs = [panel for panel in panels if panel["type"] != "stat"]
    rows = -(-len(graphs) // 3)
    figure = plt.figure(figsize=(12, 1.2 + 2.4 * rows), layout="constrained")
    top, rest = figure.subfigures(2, 1, height_ratios=[0.5, rows * 1.2])
    for axes, panel in zip(top.subplots(1, len(stats)), stats, strict=True):
        axes.axis("off")
        axes.set_title(panel["title"], fontsize=9)
        series = answers(client, filled_in(panel["targets"][0]["expr"]), ended - 4, ended)
        last = float(series[0]["values"][-1][1]) if series else 0.0
        axes.text(0.5, 0.2, shown(panel, last), fontsize=18, ha="center", color="tab:green")
    for axes, panel in zip(rest.subplots(rows, 3).flat, graphs, strict=False):
        axes.set_title(panel["title"], fontsize=9, loc="left", weight="bold")
        for target in panel["targets"]:
            for one in answers(client, filled_in(target["expr"]), began, ended):
                name = target.get("legendFormat", "")
                for label, value in one["metric"].items():
                    name = name.replace("{{" + label + "}}", value)
                points = [(at - began, float(value)) for at, value in one["values"]]
                axes.plot(*zip(*points, strict=True), label=name, linewidth=1)
        axes.yaxis.set_major_formatter(lambda value, _, panel=panel: shown(panel, value))
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.2)
        if panel["targets"] and axes.lines:
            axes.legend(fontsize=6, frameon=False, ncols=2)
    plt.savefig(picture, dpi=80)


def shown(panel: dict[str, Any], value: float) -> str:
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "")
    if unit == "bytes":
        value /= 2**20
    return UNITS.get(unit, "{x:.4g}").format(x=value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0, help="of load")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        ready("smollm2-135m", common=FLAGS) as server,
        prometheus(Path(folder), f"127.0.0.1:{server.port}") as client,
    ):
        began = time.time()
        load(server.url, given.seconds)
        draw(client, began, began + given.seconds, given.picture)


if __name__ == "__main__":
    main()
