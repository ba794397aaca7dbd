"""Evaluations through a real OpenTelemetry Collector, in both directions."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import uvicorn
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor

from feedback.events import Score, new_response_id
from serving.evaluations import tell_through
from telemetry import evaluations as names
from tests.helpers.collector import collector
from tests.helpers.events_built import build_vote
from tests.helpers.ledger import wait_for
from tests.helpers.servers import free_port
from tests.helpers.serving import SECRET, Bench

pytestmark = pytest.mark.real


@contextmanager
def serving(bench: Bench) -> Iterator[str]:
    """The API of a bench on a real port; its base URL."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(bench.app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def an_evaluation_comes_through_a_collector_and_a_vote_goes_out_to_one(tmp_path: Path) -> None:
    waiting: list[names.EvaluationLog] = []
    bench = Bench(tell_vote=lambda vote: tell_through(waiting[0])(vote))
    with serving(bench) as url, collector(tmp_path, send_to=url, key=SECRET) as (endpoint, told):
        waiting.append(names.EvaluationLog(endpoint))
        provider = LoggerProvider(shutdown_on_exit=False)
        provider.add_log_record_processor(SimpleLogRecordProcessor(OTLPLogExporter(endpoint=endpoint)))
        response_id = new_response_id()
        provider.get_logger("judge").emit(
            event_name=names.EVENT,
            timestamp=int(datetime.now(UTC).timestamp() * 1e9),
            attributes={names.NAME: "relevance", names.SCORE: 0.25, names.RESPONSE_ID: response_id},
        )
        provider.shutdown()
        wait_for(lambda: bench.outbox.events)
        [score] = bench.outbox.events
        assert isinstance(score, Score)
        assert (score.name, score.value, score.response_id) == ("relevance", 0.25, response_id)

        vote = build_vote("thumb").model_dump(mode="json", exclude={"api_key_id"}, exclude_none=True)
        headers = {"authorization": f"Bearer {SECRET}"}
        assert httpx.post(f"{url}/v1/feedback", json=vote, headers=headers).status_code == 202
        assert waiting[0].close() == 0  # both, the score too, are told, and none was dropped
        wait_for(lambda: told.exists() and vote["event_id"] in told.read_text(encoding="utf-8"))
    assert len(bench.outbox.events) == 2  # what came back to us by way of the collector was known


def what_nobody_takes_is_counted_as_dropped_and_holds_up_nothing(tmp_path: Path) -> None:
    log = names.EvaluationLog(f"http://127.0.0.1:{free_port()}/v1/logs")
    for _ in range(20):
        log.emit({names.NAME: "thumb"}, datetime.now(UTC))
    assert log.close() == 20
