"""Which engines serve before their kernels are compiled, and which wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from piecework.kernels.memory_info import MemoryInfo
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.distributed.ranks import ALONE
from piecework.runtime.executor.first_start import starts_without_kernels
from piecework.runtime.files.resolve import resolve_model_path

_GIB = 2**30


class Device:
    """Lacks its kernels. `compiled` is what was asked for."""

    def __init__(self, free: int = 8 * _GIB, *, can_compile: bool = True) -> None:
        self._free, self._can_compile = free, can_compile
        self.compiled: set[str] | None = None

    def memory(self) -> MemoryInfo:
        return MemoryInfo(free=self._free, total=8 * _GIB)

    def leave_out_kernels(self) -> bool:
        return True

    def prepare_kernels(
        self, names: Callable[[], Iterable[str]], *, at_low_priority: bool = False
    ) -> bool:
        self.compiled = set(names())
        return self._can_compile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.fixture(autouse=True)
def role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_KERNELS", "later")


def starts(folder: Path, device: Device, ranks: Any = ALONE, **changes: Any) -> bool:
    config = EngineConfig(model_path=str(folder), **changes)
    return starts_without_kernels(config, str(folder), device, ranks)  # type: ignore[arg-type]


def test_a_small_model_is_served_without_them(folder: Path) -> None:
    device = Device()
    assert starts(folder, device) and device.compiled is None


@pytest.mark.parametrize(
    "changes",
    [
        {"startup": "full"},
        {"attention_backend": "torch"},
        {"batch_invariant": True},
        {"kv_events_config": '{"publisher": "zmq"}'},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_whose_results_or_readers_would_notice_wait(
    folder: Path, changes: dict[str, Any]
) -> None:
    device = Device()
    assert not starts(folder, device, **changes) and device.compiled == {"auto"}


def test_ranks_wait(folder: Path) -> None:
    device = Device()
    assert not starts(folder, device, SimpleNamespace(size=2))
    assert device.compiled is not None and "ranks" in device.compiled


def test_a_large_model_waits(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(_GIB + 1)
    assert not starts(folder, Device())


def test_a_machine_without_memory_for_two_processes_waits(folder: Path) -> None:
    assert not starts(folder, Device(free=_GIB))


def test_a_user_can_have_every_model_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_KERNELS", "wait")
    assert not starts(folder, Device())


def test_what_the_engine_will_call_is_compiled_with_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIECEWORK_KERNELS", "required")
    device = Device()
    file = Path(resolve_model_path("smollm2-135m"))
    assert not starts(file, device, kv_cache_dtype="int8", dtype="float32")
    assert device.compiled == {"Q4_1", "Q8_0", "F32", "int8", "float32"}


def test_a_successor_without_kernels_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_KERNELS", "required")
    with pytest.raises(ValueError, match="cannot be compiled"):
        starts(folder, Device(can_compile=False))
