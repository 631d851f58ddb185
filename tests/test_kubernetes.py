"""The manifests of docker/kubernetes: valid, and of what the server and its image really have."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from piecework.cli.core.flags import ArgumentParser, ServerConfig, add_config_arguments
from piecework.cli.core.settings import settable, variable_of
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.messages import EngineStats
from piecework.server.core.open_paths import OPEN_PATHS
from piecework.server.launch import END_TIMEOUT
from piecework.server.observability.gateway_metrics import gateway_metrics

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docker" / "kubernetes"
OF_THE_CORE = ("apps/v1", "v1", "policy/v1", "autoscaling/v2")


def documents() -> Iterator[tuple[Path, Any]]:
    for path in sorted(FOLDER.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path, document


def one(kind: str, folder: str = "base") -> Any:
    (found,) = (
        document
        for path, document in documents()
        if document.get("kind") == kind and path.parent.name == folder
    )
    return found


POD = one("Deployment")["spec"]["template"]
(SERVER,) = POD["spec"]["containers"]


def test_each_file_belongs_to_its_kustomization() -> None:
    for path in sorted(FOLDER.glob("*/kustomization.yaml")):
        told = yaml.safe_load(path.read_text())
        named = {*told["resources"], *(patch["path"] for patch in told.get("patches", []))}
        others = {own.name for own in path.parent.glob("*.yaml")} - {path.name}
        assert {name for name in named if not name.startswith("..")} == others
        assert all((path.parent / name).exists() for name in named)


def test_the_command_line_knows_the_flags() -> None:
    parser = ArgumentParser()
    add_config_arguments(parser, EngineConfig, ServerConfig)
    arguments = parser.parse_args(SERVER["args"])
    assert arguments.log_format == "json"


def test_no_variable_of_the_service_is_taken_for_a_flag() -> None:
    """Kubernetes gives pods NAME_PORT=tcp://10.0.0.1:80 and others for each Service."""
    parser = ArgumentParser()
    add_config_arguments(parser, EngineConfig, ServerConfig)
    service = variable_of(f"{one('Service')['metadata']['name']}_port").removeprefix("PIECEWORK_")
    read = {variable_of(key) for key in settable(parser)}
    assert service not in read or POD["spec"]["enableServiceLinks"] is False


def test_who_selects_pods_finds_them() -> None:
    labels = POD["metadata"]["labels"].items()
    selectors = [
        one("Deployment")["spec"]["selector"]["matchLabels"],
        one("Service")["spec"]["selector"],
        one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one("InferencePool", "gateway")["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels for selector in selectors)
    (port,) = SERVER["ports"]
    assert one("Service")["spec"]["ports"][0]["targetPort"] == port["name"]
    assert one("InferencePool", "gateway")["spec"]["targetPorts"] == [
        {"number": port["containerPort"]}
    ]
    annotations = POD["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"])
    assert f"EXPOSE {port['containerPort']}" in (ROOT / "docker/cpu.Dockerfile").read_text()


def test_probes_ask_what_needs_no_key() -> None:
    paths = {name: SERVER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness")}
    assert set(paths.values()) == {"/ready"} and {"/ready", "/live"} <= OPEN_PATHS
    assert SERVER["livenessProbe"]["httpGet"]["path"] == "/live"
    assert POD["metadata"]["annotations"]["prometheus.io/path"] in OPEN_PATHS


def test_a_pod_is_killed_only_after_its_server_would_have_ended() -> None:
    (drain,) = (
        float(flag.partition("=")[2])
        for flag in SERVER["args"]
        if flag.startswith("--drain-timeout")
    )
    sleep = SERVER["lifecycle"]["preStop"]["sleep"]["seconds"]
    readiness = SERVER["readinessProbe"]
    assert POD["spec"]["terminationGracePeriodSeconds"] >= sleep + drain + END_TIMEOUT
    assert sleep >= readiness["periodSeconds"]


def test_a_pod_may_write_to_its_volumes_alone() -> None:
    assert SERVER["securityContext"]["readOnlyRootFilesystem"]
    assert POD["spec"]["securityContext"]["runAsUser"] == 10001
    mounted = {mount["mountPath"] for mount in SERVER["volumeMounts"]}
    # Models and pieces; the engine's sockets; memory that ranks share.
    assert mounted == {"/home/piecework/.cache", "/tmp", "/dev/shm"}
    assert {mount["name"] for mount in SERVER["volumeMounts"]} == {
        volume["name"] for volume in POD["spec"]["volumes"]
    }
    # Triton's own default is ~/.triton.
    image = (ROOT / "docker/cuda.Dockerfile").read_text()
    kernels = re.search(r"TRITON_CACHE_DIR=(\S+)/triton", image)
    assert kernels is not None and kernels[1] in mounted
    claim = POD["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert one("PersistentVolumeClaim")["metadata"]["name"] == claim


def test_the_autoscaler_and_its_adapter_name_the_same_metrics_of_the_server() -> None:
    wanted = {
        metric["pods"]["metric"]["name"]
        for metric in one("HorizontalPodAutoscaler")["spec"]["metrics"]
    }
    (rule,) = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    pattern = re.search(r'=~"([^"]+)"', rule["seriesQuery"])
    assert pattern is not None
    source = (ROOT / "server" / "observability" / "metrics.py").read_text()
    for name in wanted:
        series = name.replace("piecework_", "piecework:", 1)
        assert re.fullmatch(pattern[1], series)
        assert f'"{series.partition(":")[2]}"' in source


def test_the_pool_s_metrics_are_those_that_the_server_has() -> None:
    class Engine:
        stats, info = EngineStats(), None

    families = {family.name for family in gateway_metrics(Engine(), "m")}  # type: ignore[arg-type]
    told = set(re.findall(r"vllm:\w+", (FOLDER / "gateway" / "pool.yaml").read_text()))
    # Metrics of speculative decoding have vLLM's names too, and no gateway reads them.
    assert told == {name for name in families if "spec_decode" not in name}


@pytest.mark.slow  # a hundred megabytes of schemas
def test_manifests_fit_the_published_schemas() -> None:
    """`pip install 'piecework[manifests]'`."""
    validate = pytest.importorskip("kubernetes_validate")
    for version in ("1.30", validate.latest_version()):
        for path, document in documents():
            if document.get("apiVersion") in OF_THE_CORE and "gpu" not in path.parts:
                # A patch of kustomize is no whole object.
                validate.validate(document, version, strict=True)
    assert "kubernetes_validate" in sys.modules
