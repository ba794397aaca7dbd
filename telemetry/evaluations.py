"""Feedback as OpenTelemetry knows it: the event `gen_ai.evaluation.result`, its attributes, and an exporter.

Names: OpenTelemetry's semantic conventions for generative AI (in development), and our own under `flywheel.`.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime

from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider, ReadableLogRecord
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, LogRecordExportResult
from opentelemetry.sdk.resources import SERVICE_NAME, Resource

log = logging.getLogger(__name__)

EVENT = "gen_ai.evaluation.result"
NAME = "gen_ai.evaluation.name"
SCORE = "gen_ai.evaluation.score.value"
LABEL = "gen_ai.evaluation.score.label"
EXPLANATION = "gen_ai.evaluation.explanation"
RESPONSE_ID = "gen_ai.response.id"
CONVERSATION_ID = "gen_ai.conversation.id"
COMPARISON_ID = "flywheel.comparison_id"
FEEDBACK_ID = "flywheel.feedback_id"
RATER = "flywheel.rater"
RATER_SOURCE = "flywheel.source"

_QUEUE = 10_000
_TIMEOUT_S = 5.0


class EvaluationLog:
    """Sends evaluation events to an OTLP/HTTP endpoint, in batches, from a thread of its own.

    Non-guarantee: it is a copy for onlookers, so what does not fit in its queue or can't be delivered is dropped;
    `dropped` counts that, and `close` tells it.
    """

    def __init__(self, endpoint: str) -> None:
        """endpoint: the whole address, such as http://127.0.0.1:4318/v1/logs."""
        self._exporter = _CountingExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
        self._provider = LoggerProvider(Resource.create({SERVICE_NAME: "flywheel"}), shutdown_on_exit=False)
        self._provider.add_log_record_processor(
            BatchLogRecordProcessor(self._exporter, schedule_delay_millis=1_000, max_queue_size=_QUEUE)
        )
        self._logger = self._provider.get_logger("flywheel.feedback")
        self._guard = threading.Lock()
        self.emitted = 0

    def emit(self, attributes: Mapping[str, str | float], time: datetime) -> None:
        """Send one event, later. Never blocks."""
        with self._guard:
            self.emitted += 1
        self._logger.emit(timestamp=int(time.timestamp() * 1e9), event_name=EVENT, attributes=dict(attributes))

    def close(self) -> int:
        """Send what is queued, for a few seconds at most; returns how many events were dropped in all."""
        self._provider.shutdown()
        dropped = self.emitted - self._exporter.delivered
        log.info("evaluation events: %d delivered, %d dropped", self._exporter.delivered, dropped)
        return dropped


class _CountingExporter(OTLPLogExporter):
    """Counts what the other side took."""

    delivered = 0

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        result = super().export(batch)
        if result is LogRecordExportResult.SUCCESS:
            self.delivered += len(batch)
        return result
