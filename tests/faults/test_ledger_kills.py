"""SIGKILL of the ledger's processes, the broker and PostgreSQL at random moments: the ledger law holds."""

import random
import time
from pathlib import Path

import pytest

from feedback.audit import audit
from tests.helpers.ledger import ledger_settings, rows, stored_ids, wait_for
from tests.helpers.servers import Broker, Postgres
from tests.helpers.victims import Victim

pytestmark = pytest.mark.real

SEED = 7
KILLING_S = 40.0
PAUSE_S = (0.3, 2.0)


def what_was_acknowledged_is_stored_exactly_once_whatever_is_killed(tmp_path: Path, broker: Broker) -> None:
    postgres = Postgres(tmp_path / "postgres").start()
    dsn = postgres.new_database()
    settings = ledger_settings(tmp_path / "outbox", broker.bootstrap_servers)
    module = ["-m", "tests.helpers.ledger_process"]
    writer = Victim([*module, "writer", str(settings.outbox)]).start()
    relay = Victim([*module, "relay", settings.model_dump_json()]).start()
    ingest = Victim([*module, "ingest", settings.model_dump_json(), dsn]).start()
    generator = random.Random(SEED)
    try:
        ends = time.monotonic() + KILLING_S
        wait_for(lambda: len(stored_ids(dsn)) > 0)
        while time.monotonic() < ends:
            time.sleep(generator.uniform(*PAUSE_S))
            victims: tuple[Victim | Broker | Postgres, ...] = (writer, relay, ingest) * 2 + (broker, postgres)
            target = generator.choice(victims)
            target.kill()
            target.start()
        time.sleep(2)  # one more quiet stretch, so that the last ones started have work to do
        writer.kill()
        acknowledged = writer.lines
        wait_for(lambda: (report := audit(settings, dsn)).pending == 0 and report.unread == 0, within_s=60)
        report = audit(settings, dsn)
        stored = stored_ids(dsn)
        orphans = rows(dsn, "select count(*) as answered from feedback join interactions using (response_id)")
        assert relay.terminate() == 0
        assert ingest.terminate() == 0
    finally:
        for victim in (writer, relay, ingest):
            victim.kill()
        postgres.stop()
    assert len(acknowledged) > 200
    assert writer.lives + relay.lives + ingest.lives > 10
    assert len(stored) == len(set(stored))
    assert set(acknowledged) <= set(stored)
    assert report.clean, report
    assert report.dead_lettered == 0
    assert orphans[0]["answered"] >= len(acknowledged) // 2 - writer.lives
    assert relay.lines[-1].startswith("relay stopped: ")
    assert ingest.lines[-1].startswith("ingest stopped: ")
    print(f"acknowledged {len(acknowledged)}, stored {len(stored)}, {report}")
