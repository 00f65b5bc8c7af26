"""Metrics for Prometheus at /metrics: the engine's counters, its queue, and response times."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from linnet.inference import Engine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics(Collector):
    """The metrics of one server, in a separate registry, so that two servers in one process do not share metrics."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self.responses = Counter("linnet_http_responses", "HTTP responses", ["path", "status"], registry=self._registry)
        self.first_token = Histogram(
            "linnet_time_to_first_token_seconds",
            "From the request to its first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.whole = Histogram(
            "linnet_request_seconds",
            "From the request to the end of its response",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        counters = engine.counters
        finished = CounterMetricFamily("linnet_completions", "Completions by how they ended", labels=["finish"])
        for finish, count in dict(counters.finished).items():
            finished.add_metric([finish], count)
        yield finished
        yield CounterMetricFamily("linnet_prompt_tokens", "Tokens read", counters.prompt_tokens)
        yield CounterMetricFamily("linnet_generated_tokens", "Tokens generated", counters.generated_tokens)
        yield CounterMetricFamily("linnet_rounds", "Rounds of the engine", counters.rounds)
        yield GaugeMetricFamily("linnet_completions_waiting", "Completions without a slot", engine.waiting)
        yield GaugeMetricFamily("linnet_completions_active", "Completions in a slot", engine.active)
        yield GaugeMetricFamily("linnet_slots", "Slots of the engine", engine.slots)
        yield GaugeMetricFamily("linnet_state_bytes", "Memory of a slot", engine.state_bytes)
