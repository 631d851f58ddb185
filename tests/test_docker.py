"""The images: pinned, not run as root, checked for health, and made of files that are there."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from piecework.cli.core.flags import ArgumentParser, ServerConfig, add_config_arguments
from piecework.runtime.config.engine import EngineConfig

ROOT = Path(__file__).parents[1]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """(keyword, rest) of each, continued lines joined, `ARG` defaults put in."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", path.read_text(), flags=re.M))
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.M))
    filled = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], text)
    return [
        (line.split()[0], line.partition(" ")[2].strip())
        for line in filled.splitlines()
        if line.strip()
    ]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_is_pinned_unprivileged_and_checked(path: Path) -> None:
    lines = instructions(path)
    bases = [rest.split()[0] for keyword, rest in lines if keyword == "FROM"]
    assert len(bases) == 2, "one stage builds, the other runs"
    assert all(re.search(r":.*\d+\.\d+.*", base) and not base.endswith("latest") for base in bases)
    last = max(index for index, (keyword, _) in enumerate(lines) if keyword == "FROM")
    final = lines[last:]
    assert [rest for keyword, rest in final if keyword == "USER"] == ["10001"]
    assert any(keyword == "HEALTHCHECK" and "/health" in rest for keyword, rest in final)
    installs = [rest for keyword, rest in lines if keyword == "RUN" and "pip install" in rest]
    assert installs and all("-c /tmp/constraints.txt" in rest for rest in installs)
    assert re.search(r"torch==\d+\.\d+\.\d+", installs[0])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_an_image_copies_is_there(path: Path) -> None:
    sources = [
        rest.split()[0]
        for keyword, rest in instructions(path)
        if keyword == "COPY" and "--from" not in rest
    ]
    assert sources and all((ROOT / source).exists() for source in sources)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_starts_a_server_that_the_command_line_knows(path: Path) -> None:
    (entry,) = (json.loads(rest) for keyword, rest in instructions(path) if keyword == "ENTRYPOINT")
    words = " ".join(entry).replace('"$@"', "").split()
    flags = words[words.index("serve") + 1 :]
    flags = flags[:-1] if flags[-1] == "piecework" else flags
    parser = ArgumentParser()
    add_config_arguments(parser, EngineConfig, ServerConfig)
    arguments = parser.parse_args(flags)
    assert (arguments.host, arguments.port) == ("0.0.0.0", 30000)


def test_every_dependency_has_one_version() -> None:
    pinned = dict(
        re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "docker" / "constraints.txt").read_text(), re.M)
    )
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[^\w-]", dependency)[0] for dependency in wanted}
    assert names - pinned.keys() == {"torch"}


def test_pins_agree_with_what_the_pinned_ask_of_each_other() -> None:
    """torch's own demands among them: 2.11, which two images take, wants setuptools below 82. Other
    versions than the pinned ones ask for other things.
    """
    text = (ROOT / "docker" / "constraints.txt").read_text()
    pinned = {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([\w.-]+)==([\w.]+)$", text, re.M)
    }
    asked = [("torch 2.11", Requirement("setuptools<82"))]
    for name in [*pinned, "torch"]:
        with contextlib.suppress(PackageNotFoundError):
            if version(name) == pinned.get(canonicalize_name(name), version(name)):
                asked += [(name, Requirement(line)) for line in requires(name) or []]
    wrong = [
        f"{name} asks for {requirement}, pinned is {pinned[key]}"
        for name, requirement in asked
        if (key := canonicalize_name(requirement.name)) in pinned
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        and not requirement.specifier.contains(pinned[key], prereleases=True)
    ]
    assert len(asked) > 50 and not wrong


def test_compose_has_a_service_for_each_image() -> None:
    services: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())[
        "services"
    ]
    built = {ROOT / service["build"]["dockerfile"] for service in services.values()}
    assert built == set(DOCKERFILES)
    assert all(
        service["profiles"] == [name] and service["command"][0] == "--model-path"
        for name, service in services.items()
    )
