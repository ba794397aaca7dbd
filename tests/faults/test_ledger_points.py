"""The ledger under named faults: the law holds, the counts add up, and the lag returns to 0 by itself."""

import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from feedback.audit import AuditReport, audit
from feedback.outbox import Outbox
from feedback.outbox_file import list_files
from feedback.settings import FeedbackSettings
from tests.helpers.events_built import build_thumb, build_vote
from tests.helpers.kafka import KafkaCluster, kafka_home
from tests.helpers.ledger import accept, ledger_settings, rows, running, stored_ids, wait_for
from tests.helpers.proxy import cutting_commits
from tests.helpers.servers import Broker, free_port
from tests.helpers.serving import SECRET
from tests.helpers.victims import Victim

pytestmark = pytest.mark.real

MODULE = ["-m", "tests.helpers.ledger_process"]
DEATHS = [
    ("writer", "outbox_file.py:insert:call:5:SIGKILL"),  # before the outbox commits
    ("writer", "outbox_file.py:insert:return:5:SIGKILL"),  # after it, before anybody was told
    ("relay", "outbox_file.py:mark_sent:call:3:SIGKILL"),  # the broker has acknowledged, the outbox does not know
    ("relay", "outbox_file.py:mark_sent:return:3:SIGKILL"),
    ("ingest", "store.py:advance:call:3:SIGKILL"),  # at the beginning of the transaction
    ("ingest", "store.py:insert_dead_letters:call:3:SIGKILL"),  # within it, all rows written
    ("ingest", "ingest.py:moved:call:3:SIGKILL"),  # after its commit
]


@dataclass
class Ledger:
    """A writer, a relay and an ingest at work."""

    settings: FeedbackSettings
    dsn: str
    writer: Victim
    relay: Victim
    ingest: Victim

    def settle(self) -> AuditReport:
        """Stop writing, wait until nothing is on its way, and check the law."""
        self.writer.kill()
        acknowledged = [line for line in self.writer.lines if line != "refused"]
        wait_for(lambda: (report := audit(self.settings, self.dsn)).pending == 0 and report.unread == 0, within_s=90)
        report = audit(self.settings, self.dsn)
        stored = stored_ids(self.dsn)
        assert len(acknowledged) > 20
        assert len(stored) == len(set(stored))
        assert set(acknowledged) <= set(stored)
        assert report.clean, report
        return report


@contextmanager
def ledger_at_work(settings: FeedbackSettings, dsn: str, **environment: str) -> Iterator[Ledger]:
    """environment: of the writer."""
    told = settings.model_dump_json()
    ledger = Ledger(
        settings,
        dsn,
        writer=Victim([*MODULE, "writer", str(settings.outbox)]).start(**environment),
        relay=Victim([*MODULE, "relay", told]).start(),
        ingest=Victim([*MODULE, "ingest", told, dsn]).start(),
    )
    try:
        wait_for(lambda: len(stored_ids(dsn)) > 10)
        yield ledger
    finally:
        for victim in (ledger.writer, ledger.relay, ledger.ingest):
            victim.resume()
            victim.kill()


def a_death_at_any_named_point_loses_and_doubles_nothing(tmp_path: Path, broker: Broker, dsn: str) -> None:
    settings = ledger_settings(tmp_path / "outbox", broker.bootstrap_servers)
    with ledger_at_work(settings, dsn) as ledger:
        for name, point in DEATHS:
            victim: Victim = getattr(ledger, name)
            victim.kill()
            victim.start(LEDGER_AT=point)
            assert victim.wait(60) == -9, point
            victim.start()
        assert ledger.settle().dead_lettered == 0


@pytest.mark.parametrize("point", ["store.py:advance:call:3:SIGSTOP", "store.py:insert_events:call:3:SIGSTOP"])
def an_ingest_that_was_frozen_stores_nothing_when_it_wakes_and_holds_nobody_up(
    tmp_path: Path, broker: Broker, dsn: str, point: str
) -> None:
    settings = ledger_settings(
        tmp_path / "outbox", broker.bootstrap_servers, request_timeout_s=1.0, delivery_timeout_s=1.0
    )
    with ledger_at_work(settings, dsn) as ledger:
        ledger.ingest.kill()
        ledger.ingest.start(LEDGER_AT=point)
        assert ledger.ingest.process is not None
        frozen = psutil.Process(ledger.ingest.process.pid)
        wait_for(lambda: frozen.status() == psutil.STATUS_STOPPED)
        before = len(stored_ids(dsn))
        other = Victim([*MODULE, "ingest", settings.model_dump_json(), dsn]).start()
        try:
            wait_for(lambda: len(stored_ids(dsn)) > before + 50)
            ledger.ingest.resume()
            time.sleep(1)
            ledger.settle()
            assert ledger.ingest.terminate() == 0
            told = dict(item.rsplit(" ", 1) for item in ledger.ingest.lines[-1].partition(": ")[2].split(", "))
            assert int(told["stale"]) + int(told["retries"]) >= 1
            assert other.terminate() == 0
        finally:
            other.kill()


def a_connection_that_is_cut_at_the_commit_stores_the_batch_once(tmp_path: Path, broker: Broker, dsn: str) -> None:
    settings = ledger_settings(tmp_path / "outbox", broker.bootstrap_servers)
    with cutting_commits(dsn, every=3, times=8) as (through, cutter), ledger_at_work(settings, dsn) as ledger:
        ledger.ingest.kill()
        ledger.ingest.arguments[-1] = through
        ledger.ingest.start()
        wait_for(lambda: cutter.left == 0, within_s=60)
        ledger.settle()


def a_full_disk_refuses_and_loses_nothing_and_goes_on_when_there_is_room(
    tmp_path: Path, broker: Broker, dsn: str
) -> None:
    settings = ledger_settings(tmp_path / "outbox", broker.bootstrap_servers)
    with ledger_at_work(settings, dsn, LEDGER_FILE_BYTES="300000") as ledger:
        wait_for(lambda: ledger.writer.lines.count("refused") >= 5)
        full = len(ledger.writer.lines)
        ledger.writer.signal(10)  # SIGUSR1: there is room again
        wait_for(lambda: len(ledger.writer.lines) > full + 40 and ledger.writer.lines[-1] != "refused")
        ledger.settle()


def what_the_disk_changed_in_an_outbox_is_a_dead_letter_and_a_damaged_file_is_named(
    tmp_path: Path, broker: Broker, dsn: str
) -> None:
    settings = ledger_settings(tmp_path / "outbox", broker.bootstrap_servers)
    hurt = build_vote("comment", text="words that the disk will change")
    accept(settings.outbox, [hurt, *(build_thumb() for _ in range(20))])
    [first] = list_files(settings.outbox)
    holder = Outbox.open(settings.outbox)  # so that the next one makes a second file
    accept(settings.outbox, [build_thumb() for _ in range(300)])
    holder.close()
    [second] = [path for path in list_files(settings.outbox) if path != first]
    raw = first.read_bytes()
    first.write_bytes(raw.replace(b"the disk will", b"the d\xff\x00k will"))
    second.write_bytes(second.read_bytes()[:4096] + bytes(second.stat().st_size - 4096))
    with running(settings, dsn):
        wait_for(lambda: len(stored_ids(dsn)) == 20)
        wait_for(lambda: audit(settings, dsn).pending == 0)
    report = audit(settings, dsn)
    assert (report.accepted, report.stored, report.dead_lettered) == (21, 20, 1)
    assert report.damaged_files == [second.name]
    assert not report.clean
    assert hurt.event_id not in stored_ids(dsn)
    assert sqlite3.connect(first).execute("select dead_reason from events where dead_at is not null").fetchall()


def the_same_vote_fifty_times_at_once_is_one_vote(tmp_path: Path, broker: Broker, dsn: str) -> None:
    settings = ledger_settings(tmp_path / "outbox", broker.bootstrap_servers)
    port = free_port()
    gateway = Victim([*MODULE, "gateway", str(settings.outbox), str(port)]).start()
    vote = build_thumb().model_dump(mode="json", exclude={"api_key_id"}, exclude_none=True)

    def send(_: int) -> str:
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/feedback",
            json=vote,
            headers={"authorization": f"Bearer {SECRET}"},
            timeout=30,
        )
        return str(answer.json()["status"])

    try:
        wait_for(lambda: _listens(port))
        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(send, range(50)))
        assert sorted(answers) == ["accepted"] + ["duplicate"] * 49
        with running(settings, dsn):
            wait_for(lambda: stored_ids(dsn) == [vote["event_id"]])
    finally:
        gateway.kill()


@pytest.mark.kafka
def the_nodes_of_a_kafka_can_die_one_after_the_other(tmp_path: Path, dsn: str) -> None:
    kafka_home()
    cluster = KafkaCluster(tmp_path).start()
    settings = ledger_settings(
        tmp_path / "outbox",
        cluster.bootstrap_servers,
        replication_factor=3,
        request_timeout_s=5.0,
        delivery_timeout_s=10.0,
    )
    try:
        with ledger_at_work(settings, dsn) as ledger:
            for node in cluster.nodes:
                node.kill()
                time.sleep(2)
                node.start()
                before = len(stored_ids(dsn))
                wait_for(lambda before=before: len(stored_ids(dsn)) > before + 20, within_s=60)
            report = ledger.settle()
    finally:
        cluster.kill()
    assert report.dead_lettered == 0
    assert rows(dsn, "select count(distinct log_id) as logs from ingest_offsets")[0]["logs"] == 2  # one for each topic


def _listens(port: int) -> Any:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/live", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
