"""The metrics of a fleet, exported together with those of its models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..observability.metrics import PREFIX, MetricRegistry
from .fleet import Fleet
from .member import Member, MemberState


class FleetMetrics(MetricRegistry):
    """The fleet's metrics. Series of a model have its name as `model_name`, others an empty one."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet, "")
        self._fleet = fleet

    def exposition(self) -> bytes:
        return generate_latest(cast(CollectorRegistry, _Merged(self._registries())))

    def collect(self) -> Iterator[Metric]:
        members = list(self._fleet.members.values())
        for name, documentation, values in (
            ("model_loaded", "1 while the model serves.",
             [each.state is MemberState.READY for each in members]),
            ("model_memory_bytes", "Resident memory of the model's processes.",
             [each.resident for each in members]),
            ("model_requests", "Requests that the model has.",
             [each.under_way for each in members]),
            ("model_waiting_requests", "Requests that wait until the model is loaded.",
             [self._fleet.waiting_for(each) for each in members]),
        ):  # fmt: skip
            yield _family(GaugeMetricFamily, name, documentation, members, values)
        failures = [each.failures for each in members]
        yield _family(
            CounterMetricFamily, "model_failures", "How often it failed.", members, failures
        )
        unloads = CounterMetricFamily(
            PREFIX + "model_unloads", "How often, and why.", labels=["model_name", "reason"]
        )
        for member in members:
            for reason, count in member.unloads.items():
                unloads.add_metric([member.name, reason], count)
            yield member.load_seconds.family(member.name)
        yield unloads
        limit = GaugeMetricFamily(
            PREFIX + "fleet_memory_limit_bytes", "Memory that all models may take together."
        )
        limit.add_metric([], self._fleet.memory_limit)
        yield limit

    def _registries(self) -> Iterator[MetricRegistry]:
        yield self
        for member in self._fleet.members.values():
            if member.service is not None:
                yield member.service.app.state.serving.metrics


class _Merged:
    """Several registries as one. Families with the same name are merged."""

    def __init__(self, registries: Iterable[MetricRegistry]) -> None:
        self._registries = list(registries)

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for family in chain.from_iterable(each.families() for each in self._registries):
            if family.name in families:
                families[family.name].samples += family.samples
            else:
                families[family.name] = family
        return families.values()


def _family(
    kind: Any, name: str, documentation: str, members: list[Member], values: Sequence[float]
) -> Metric:
    family = kind(PREFIX + name, documentation, labels=["model_name"])
    for member, value in zip(members, values, strict=True):
        family.add_metric([member.name], value)
    return cast(Metric, family)
