"""Runs static programs on a CPU that this machine is not: a Sapphire Rapids that Bochs computes
instruction by instruction, under a Linux that is booted for them (lab/performance-cpu.md tells how
to get both).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PROGRAM, KERNEL = "PIECEWORK_TEST_BOCHS", "PIECEWORK_TEST_BOCHS_KERNEL"
"""Variables that name Bochs, and the image of a kernel."""
_OWN = Path(__file__).parent
_LOADER = (
    Path("/usr/lib/ISOLINUX/isolinux.bin"),
    Path("/usr/lib/syslinux/modules/bios/ldlinux.c32"),
)
_FAULTS = "clearcpuid=fsrm"
"""Bochs has fast short moves without the fast moves that they imply, which a kernel relies on."""
_SETTINGS = """\
cpu: model=sapphire_rapids, count=1, ips=50000000, {lacks}ignore_bad_msrs=1
memory: guest=1024, host=1024
romimage: file=$BXSHARE/BIOS-bochs-latest, options=fastboot
vgaromimage: file=$BXSHARE/VGABIOS-lgpl-latest.bin
display_library: nogui
ata0-master: type=cdrom, path={disc}, status=inserted
boot: cdrom
clock: sync=none
com1: enabled=1, mode=file, dev={folder}/console
port_e9_hack: enabled=1
log: {folder}/log
panic: action=fatal
"""


def missing() -> list[str]:
    """What this machine lacks for it."""
    named = [name for name in (PROGRAM, KERNEL) if not Path(os.environ.get(name, "/nil")).is_file()]
    loader = [str(path) for path in _LOADER if not path.is_file()]
    return [*named, *loader, *(["xorriso"] if shutil.which("xorriso") is None else [])]


def has_tiles() -> bool:
    """Whether it is a Bochs with `bochs.patch`: without, no Linux gives out AMX's registers."""
    return b"MSR_IA32_XFD" in Path(os.environ[PROGRAM]).read_bytes()


def run(programs: Sequence[Path], folder: Path, seconds: float) -> dict[str, str]:
    """What each prints, by its name."""
    first = folder / "init"
    command = [
        "g++",
        "-O1",
        "-std=c++17",
        "-static",
        str(_OWN / "bochs_init.cpp"),
        "-o",
        str(first),
    ]
    subprocess.run(command, check=True, timeout=60)
    lacks = "" if has_tiles() else 'exclude_features="amx,amx_int8,amx_bf16", '
    settings = folder / "settings"
    disc = _disc(folder, _archive(first, programs))
    settings.write_text(_SETTINGS.format(lacks=lacks, disc=disc, folder=folder))
    # It ends by what it calls a panic.
    done = subprocess.run(
        [os.environ[PROGRAM], "-q", "-f", str(settings)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    _, *parts = done.stdout.split("== begin ")
    told = {}
    for part in parts:
        name, _, text = part.partition("\n")
        text, _, status = text.partition("== end ")
        assert status.split()[:1] == ["0"], (name, status)
        told[name] = text
    assert told.keys() == {program.name for program in programs}, (folder / "console").read_text()
    return told


def _disc(folder: Path, archive: bytes) -> Path:
    files = folder / "files"
    files.mkdir()
    shutil.copy(os.environ[KERNEL], files / "kernel")
    for path in _LOADER:
        shutil.copy(path, files)
    (files / "archive").write_bytes(archive)
    (files / "isolinux.cfg").write_text(
        "default all\nlabel all\n kernel kernel\n"
        f" append initrd=archive console=ttyS0 mitigations=off panic=-1 {_FAULTS}\n"
    )
    made = folder / "disc"
    boots = ("-b", "isolinux.bin", "-c", "catalogue", "-no-emul-boot", "-boot-load-size", "4")
    command = ["xorriso", "-as", "mkisofs", "-quiet", "-o", str(made), *boots, "-boot-info-table"]
    subprocess.run([*command, str(files)], check=True, timeout=60, capture_output=True)
    return made


def _archive(first: Path, programs: Sequence[Path]) -> bytes:
    """An initramfs (the kernel's Documentation/driver-api/early-userspace/buffer-format.rst)."""
    entries = [("init", 0o100755, first.read_bytes())]
    entries += [(name, 0o40755, b"") for name in ("dev", "proc", "programs")]
    entries += [(f"programs/{path.name}", 0o100755, path.read_bytes()) for path in programs]
    made = b""
    for name, mode, data in [*entries, ("TRAILER!!!", 0, b"")]:
        ended = name.encode() + b"\0"
        fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(ended), 0)
        made += b"070701" + b"".join(b"%08X" % field for field in fields) + ended
        made += bytes(-len(made) % 4) + data
        made += bytes(-len(made) % 4)
    return made
