"""The attacks' own parts: what is sent is the same for a seed and asks for little work; what is
seen of a server is what happened.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from piecework.lab.attack.__main__ import main
from piecework.lab.attack.core_waits import CoreWaits, waited
from piecework.lab.attack.fuzz_bodies import FuzzRequest, fuzz_request, modest
from piecework.lab.attack.fuzz_seeds import TEXT_SEEDS
from piecework.lab.attack.kinds import SEEDS
from piecework.lab.attack.run import AttackSettings, Outcome
from piecework.lab.attack.watch import Seen, Watcher, server_process, used_cache

SLEEPY = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    held = []
    def do_GET(self):
        if self.path == "/swell":
            self.held.append(bytearray(b"x") * (80 * 2**20))
            time.sleep(1)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *arguments): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def sleepy() -> Iterator[int]:
    """The port of a server that answers one request at a time; `/swell` takes it a second and 80
    MB.
    """
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPY], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


def get(port: int, path: str) -> None:
    code = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}{path}').read()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_watcher_sees_how_long_health_waits_and_what_memory_is_taken(sleepy: int) -> None:
    pid = server_process(sleepy)
    assert pid is not None
    with Watcher(f"http://127.0.0.1:{sleepy}", pid) as watcher:
        time.sleep(0.5)
        calm = watcher.seen()
        get(sleepy, "/swell")
        swollen = watcher.seen()
        time.sleep(0.3)
        after = watcher.seen()
    assert calm.polls >= 3 and calm.failures == 0 and calm.worst_wait < 0.9 and calm.growth < 20
    assert 0.9 < swollen.worst_wait < 10 and 70 < swollen.growth < 120 and 70 < swollen.stays < 120
    assert after.growth < 20


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux tells of waits")
def test_time_in_which_others_had_the_core_is_not_the_servers() -> None:
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"
    command = [sys.executable, "-c", spin]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as one,
        subprocess.Popen(command, stdout=subprocess.PIPE) as other,
        subprocess.Popen(["sleep", "60"]) as asleep,
    ):
        try:
            for process in (one, other):
                assert process.stdout is not None and process.stdout.readline()
            busy, idle = CoreWaits(one.pid), CoreWaits(asleep.pid)
            before = busy.seconds(), idle.seconds()
            began = time.perf_counter()
            time.sleep(1.0)
            seconds = time.perf_counter() - began
            # Of the idle process alone: this one may have waited meanwhile.
            late = idle.seconds()[1:]
            assert waited(before[0], busy.seconds()) > 0.3 * seconds
            assert waited(before[1][1:], late) < 0.1 * seconds
        finally:
            for process in (one, other, asleep):
                process.kill()


def test_memory_that_the_server_reserved_at_its_start_is_told_from_what_grows() -> None:
    told = """\
piecework:max_total_num_tokens{model_name="m"} 1000.0
piecework:num_touched_tokens{model_name="m"} 250.0
piecework:kv_memory_bytes{model_name="m",tp_rank="0"} 6.291456e+07
piecework:kv_memory_bytes{model_name="m",tp_rank="1"} 6.291456e+07
"""
    assert used_cache(told) == 30.0 and used_cache("") == 0.0


def test_a_server_that_is_gone_is_a_failure() -> None:
    with Watcher("http://127.0.0.1:9", None) as watcher:
        time.sleep(0.3)
        seen = watcher.seen()
    assert seen.failures == seen.polls > 0 and seen.memory == []


@pytest.mark.parametrize(
    ("seen", "problems", "reason"),
    [
        (Seen(polls=9), [], None),
        (Seen(polls=9, worst_wait=0.6), [], "/health waited 0.60 s for the server"),
        (Seen(polls=9, worst_by_clock=0.6), [], None),
        (Seen(polls=9, failures=1), [], "/health failed 1 of 9 times"),
        (Seen(memory=[(100, 1000), (300, 1150), (100, 1000)]), [], "memory grew by 350 MB"),
        (
            Seen(memory=[(0, float(at)) for at in range(200)]),
            [],
            "memory does not stay flat: +100 MB",
        ),
        (Seen(), ["500 to POST /generate"], "500 to POST /generate"),
    ],
)
def test_a_goal_that_is_missed_is_told(seen: Seen, problems: list[str], reason: str | None) -> None:
    outcome = Outcome(
        name="fuzz", about="", seconds=1.0, answers=Counter(), problems=problems, seen=seen
    )
    missed = outcome.missed(AttackSettings())
    assert (
        missed == []
        if reason is None
        else len(missed) == 1 and missed[0].startswith(f"fuzz: {reason}")
    )


def requests(seed: int) -> list[FuzzRequest]:
    return [fuzz_request(TEXT_SEEDS, seed, number) for number in range(1000)]


def test_a_seed_names_its_requests() -> None:
    assert requests(1) == requests(1) != requests(2)
    assert fuzz_request(SEEDS["images"], 1, 5) == fuzz_request(SEEDS["images"], 1, 5)


def test_the_campaign_reaches_every_endpoint_with_bodies_that_are_valid_json_and_that_are_not() -> (
    None
):
    made = requests(3)
    assert {request.path for request in made} >= set(TEXT_SEEDS)
    broken = [not is_json(request.body) for request in made if request.body is not None]
    assert 0.05 < sum(broken) / len(broken) < 0.4
    assert len({request.body for request in made}) > 600


def is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def test_the_campaign_sends_every_parameter_and_every_coding() -> None:
    made = [fuzz_request(TEXT_SEEDS, 5, number) for number in range(14000)]
    sent = b"".join(request.body or b"" for request in made if not request.coding)
    table = (Path(__file__).parents[2] / "docs/parameters.md").read_text()
    known = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    embeddings = {"dimensions", "encoding_format", "embed_dtype", "endianness", "normalize"}
    embeddings.add("prompt_name")
    missing = {name for name in known if f'"{name}"'.encode() not in sent}
    assert len(known) > 100 and missing <= embeddings
    assert {request.coding for request in made} >= {"gzip", "deflate", "zstd", "gzip, gzip"}


def test_no_request_of_the_campaign_asks_for_much_work() -> None:
    def lengths(value: Any) -> Iterator[float]:
        if isinstance(value, dict):
            yield from (
                value[name]
                for name in ("max_tokens", "max_new_tokens", "n", "best_of")
                if isinstance(value.get(name), int | float)
            )
        for one in (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        ):
            yield from lengths(one)

    bodies = [
        json.loads(request.body)
        for request in requests(4)
        if request.body is not None and is_json(request.body)
    ]
    found = [length for body in bodies for length in lengths(body)]
    assert not [length for length in found if 16 < length <= 2**20]
    assert modest({"prompt": "x"}) == {"prompt": "x", "max_tokens": 4}
    assert modest({"text": "x", "sampling_params": {"n": 100}}) == {
        "text": "x",
        "sampling_params": {"n": 4, "max_new_tokens": 4},
    }


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ["--base-url", "http://192.0.2.1:30000"],
            "is not this machine; --allow-other-hosts attacks it, if it is yours",
        ),
        (["--base-url", "http://0.0.0.0:30000"], "is not this machine"),
        (["--base-url", "http://no-such-host.invalid"], "there is no such host"),
        (["--attacks", "fuzz,nap"], "there is no attack 'nap'; choose from vanishing-numbers, "),
        (["--seconds", "0"], "is not a number above 0"),
        (["--base-url", "http://127.0.0.1:9"], "no server answers at"),
    ],
)
def test_an_error_of_the_user_is_exit_code_2(
    argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(argv)
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and error in capsys.readouterr().err
