"""The gateway's metrics: names, labels and units, declared once, in Prometheus' text format.

Counters begin at zero with the process; `replica` tells the series of several gateways apart. Labels have few
values: endpoints are the paths that exist, never what a client sent.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_OVERHEAD_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1)


class GatewayMetrics:
    """The metrics of one gateway replica, in a registry of their own."""

    def __init__(self, replica: str) -> None:
        self._registry = CollectorRegistry()
        self._replica = replica
        self._requests = self._counter("requests", "Requests answered.", "endpoint", "status")
        self._tokens = self._counter("tokens", "Tokens of prompts and answers, where known.", "checkpoint", "kind")
        self._answers = self._counter("answers", "Answers by checkpoint and how they ended.", "checkpoint", "status")
        self._dropped = self._counter("interactions_dropped", "Answers that could not be recorded.")
        self._shadows = self._counter(
            "shadow_answers", "Answers that nobody is shown, and what became of them.", "outcome"
        )
        self._under_way = Gauge(
            "flywheel_requests_under_way", "Requests being answered.", ["replica"], registry=self._registry
        )
        self._seconds = self._histogram("request_seconds", "Time to the end of an answer.", _SECONDS)
        self._first_token = self._histogram("time_to_first_token_seconds", "Of streams.", _SECONDS)
        self._overhead = self._histogram("overhead_seconds", "The gateway's own time.", _OVERHEAD_S)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"flywheel_{name}", text, ["replica", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"flywheel_{name}", text, ["replica", "endpoint"], buckets=buckets, registry=self._registry)

    def count_request(self, endpoint: str, status: int) -> None:
        """A request was answered with an HTTP status."""
        self._requests.labels(self._replica, endpoint, str(status)).inc()

    def count_answer(
        self,
        endpoint: str,
        checkpoint_id: str,
        status: str,
        *,
        duration_s: float,
        overhead_s: float | None,
        time_to_first_token_s: float | None,
        prompt_tokens: int | None,
        completion_tokens: int | None,
    ) -> None:
        """One interaction, as it was recorded."""
        self._answers.labels(self._replica, checkpoint_id, status).inc()
        self._seconds.labels(self._replica, endpoint).observe(duration_s)
        if overhead_s is not None:
            self._overhead.labels(self._replica, endpoint).observe(overhead_s)
        if time_to_first_token_s is not None:
            self._first_token.labels(self._replica, endpoint).observe(time_to_first_token_s)
        for kind, count in (("prompt", prompt_tokens), ("completion", completion_tokens)):
            if count is not None:
                self._tokens.labels(self._replica, checkpoint_id, kind).inc(count)

    def count_dropped(self, count: int) -> None:
        """Interactions that could not be recorded."""
        self._dropped.labels(self._replica).inc(count)

    def count_shadow(self, outcome: str) -> None:
        """A shadow was `answered`, `failed`, or `dropped` for want of room or at the end."""
        self._shadows.labels(self._replica, outcome).inc()

    def exposition(self, under_way: int) -> bytes:
        """Prometheus' text of everything."""
        self._under_way.labels(self._replica).set(under_way)
        return generate_latest(self._registry)
