"""Metrics of an ingress for Prometheus. Needs the package prometheus-client."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from aiodaft.web.admission import BOUNDS, OUTCOMES, Counts


class IngressMetrics(Collector):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        ended = CounterMetricFamily("aiodaft_ingress_requests", "Requests that have ended.", labels=("outcome",))
        for outcome in OUTCOMES:
            ended.add_metric((outcome,), counts.ended[outcome])
        yield ended
        held = GaugeMetricFamily("aiodaft_ingress_held_requests", "Requests under way.", labels=("state",))
        held.add_metric(("running",), counts.under_way)
        held.add_metric(("waiting",), counts.waiting)
        yield held
        duration = HistogramMetricFamily("aiodaft_ingress_request_seconds", "From a request to the end of its app.")
        bounds = ["+Inf" if bound == float("inf") else str(bound) for bound in BOUNDS]
        duration.add_metric((), list(zip(bounds, accumulate(counts.durations), strict=True)), counts.seconds)
        yield duration
