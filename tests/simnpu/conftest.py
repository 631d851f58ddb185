"""The `simnpu` fixture, and a child pytest process for its tests when tests of other folders run
beside them.

A process that has the simulated device has `torch.npu`, `torch_npu` and an accelerator that is not
there otherwise, and cannot lose them again. So tests that use the fixture run in one child process,
and their reports are passed on; the rest of the suite sees nothing. When only this folder's tests
are asked for, they run in place, where a debugger reaches them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
sys.path += [str(FOLDER), str(FOLDER.parent / "npu_contract")]

from simnpu_device import build  # noqa: E402
from simnpu_device.install import Simulator, install  # noqa: E402

REPORTS = "PIECEWORK_SIMNPU_REPORTS"
"""Set in the child process: the file that it writes its reports to."""


class Reports(dict[str, list[pytest.TestReport]]):
    """Reports of set-up, call and tear-down by node id."""


child_reports = pytest.StashKey[Reports]()
child_output = pytest.StashKey[str]()
beside_others = pytest.StashKey[bool]()
_CHILD_SECONDS = 1200


@pytest.fixture(scope="session")
def simnpu() -> Simulator:
    """A simulated Ascend device: `device="npu"`, `torch.npu` and `import torch_npu` work as with
    torch_npu.

    A test asks for the fixture, in a file under tests/simnpu, and uses the device as it would use
    the real one:

        def test_replay(simnpu):
            weight, x = torch.randn(4, 4, device="npu"), torch.zeros(2, 4, device="npu")
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph, pool=torch.npu.graph_pool_handle()):
                y = x @ weight
            x.copy_(torch.randn(2, 4))
            graph.replay()
            assert torch.equal(y.cpu(), x.cpu() @ weight.cpu())

    A capture executes nothing and keeps raw addresses; freed memory reads as NaN or -1. Nothing of
    the device may be touched where a test module is imported: that happens in processes without it.
    `simnpu` itself is the `Simulator` of simnpu_device/install.py: launches of a graph, strict
    addresses, limits of memory and graphs, `assert_no_cpu_fallback`.
    """
    reason = build.missing_tools()
    if reason:
        pytest.skip(f"the simulated NPU cannot be built: {reason}")
    return install()


@pytest.fixture
def emptied_simnpu(simnpu: Simulator) -> Simulator:
    """The device without what earlier tests left to the garbage collector, which captures freeze:
    for tests that count memory.

    What others still hold may keep a segment of the allocator from being given back, with free
    blocks in it.
    """
    gc.unfreeze()
    gc.collect()
    simnpu.clean_up()
    return simnpu


@pytest.fixture
def packed_simnpu(emptied_simnpu: Simulator) -> Iterator[Simulator]:
    """The same, with all free blocks taken: a test finds no memory that the device does not count
    as free.
    """
    taken: list[torch.Tensor] = []
    with emptied_simnpu.limits(total_memory=torch.npu.memory_reserved()):
        for size in (2**power for power in range(26, 8, -1)):
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(size, dtype=torch.uint8, device="npu"))
    yield emptied_simnpu


@pytest.fixture(autouse=True)
def _leave_no_capture_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "simnpu" in request.fixturenames and build.missing_tools() is None:
        install().clean_up()


@pytest.fixture(autouse=True)
def _no_kernel_refuses_a_call() -> Iterator[None]:
    """What the device refuses is computed by plain torch; here it is a mistake of ours."""
    from piecework.kernels.npu.refusals import refused

    yield
    found = dict(refused)
    refused.clear()
    assert not found


@pytest.fixture
def torchair(simnpu: Simulator, monkeypatch: pytest.MonkeyPatch) -> object:
    """A stand-in for torchair (`torchair_standin.StandIn`)."""
    from torchair_standin import put_in_place

    return put_in_place(monkeypatch)


def _runs_in_child(item: pytest.Item) -> bool:
    others = item.session.stash.get(beside_others, False)
    return others and "simnpu" in getattr(item, "fixturenames", ())


def pytest_collection_finish(session: pytest.Session) -> None:
    others = any(FOLDER not in item.path.parents for item in session.items)
    session.stash[beside_others] = others and REPORTS not in os.environ
    for item in session.items:
        if _runs_in_child(item):
            # The first of them waits for all.
            item.add_marker(pytest.mark.timeout(_CHILD_SECONDS))


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not _runs_in_child(item):
        return None
    if child_reports not in item.session.stash:
        _run_child(item.session)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = item.session.stash[child_reports].get(item.nodeid, [])
    complete = any(report.when == "teardown" for report in reports)
    for report in reports if complete else [*reports, _lost(item)]:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The test before left set up what it shares with this one, which pytest tears down only after a
    # test of its own.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def _run_child(session: pytest.Session) -> None:
    """Runs all selected tests that use the device, and keeps their reports by node id."""
    wanted = [item.nodeid for item in session.items if _runs_in_child(item)]
    config, reports = session.config, Reports()
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        f"--rootdir={config.rootpath}",
        *(["-c", str(config.inipath)] if config.inipath else []),
    ]
    with tempfile.NamedTemporaryFile("r") as file:
        child = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *wanted],
            cwd=config.rootpath,
            env=os.environ | {REPORTS: file.name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in file:
            report = config.hook.pytest_report_from_serializable(
                config=config, data=json.loads(line)
            )
            if isinstance(report.longrepr, list):
                # The place and reason of a skip, which pytest wants as it was before JSON.
                report.longrepr = tuple(report.longrepr)
            reports.setdefault(report.nodeid, []).append(report)
    session.stash[child_reports] = reports
    session.stash[child_output] = child.stdout


def _lost(item: pytest.Item) -> pytest.TestReport:
    text = (
        "the child process ended in this test or before it:\n"
        + item.session.stash[child_output][-4000:]
    )
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if REPORTS in os.environ:
        data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
        with open(os.environ[REPORTS], "a") as file:
            file.write(json.dumps(data) + "\n")
    return report
