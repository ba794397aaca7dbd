"""The ledger under random faults, judged as Jepsen does: by what clients were told.

Clients of the REST API note for each operation whether it was ok, failed, or has an unknown outcome. Meanwhile
processes are killed and paused at random moments: the gateway, the relay, one of two ingests, the broker and
PostgreSQL. In the end everything that was ok is stored exactly once, as it was sent; nothing that failed is; what is
unknown is there once or not at all. `--ledger-seconds` makes it longer, `--ledger-seed` another one.
"""

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from feedback.audit import audit
from feedback.events import AnyVote, event_id_of, new_response_id
from tests.helpers.events_built import build_vote
from tests.helpers.ledger import ledger_settings, rows, stored_ids, wait_for
from tests.helpers.servers import Broker, Postgres, free_port
from tests.helpers.serving import ASK, SECRET
from tests.helpers.victims import Victim

pytestmark = pytest.mark.real

CLIENTS = 4
PAUSE_S = (0.3, 1.5)
FROZEN_S = (0.5, 4.0)


@dataclass
class History:
    """What a client was told, by event id."""

    ok: dict[str, AnyVote | None] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)

    def note(self, event_id: str, outcome: str, vote: AnyVote | None = None) -> None:
        """A later attempt that was ok settles an unknown one."""
        if outcome == "ok":
            self.ok[event_id] = vote
            self.unknown.discard(event_id)
            self.failed.discard(event_id)
        elif event_id not in self.ok:
            (self.failed if outcome == "failed" and event_id not in self.unknown else self.unknown).add(event_id)


class Client(threading.Thread):
    """Sends operations, one after the other, until told to stop."""

    def __init__(self, url: str, seed: int, stop: threading.Event) -> None:
        super().__init__()
        self.history = History()
        self._http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {SECRET}"}, timeout=3)
        self._random = random.Random(seed)
        self._stop_asked = stop
        self._responses = [new_response_id()]

    def run(self) -> None:
        with self._http:
            while not self._stop_asked.wait(self._random.uniform(0, 0.02)):
                operation = self._random.choice([self._ask, self._vote, self._vote, self._batch, self._nonsense])
                operation()

    def _ask(self) -> None:
        answer, outcome = self._send("/v1/chat/completions", ASK)
        if answer is not None and outcome == "ok":
            self.history.note(event_id_of(answer.json()["id"]), "ok")
            self._responses.append(answer.json()["id"])

    def _vote(self) -> None:
        """A vote, perhaps a changed mind, sent until its outcome is known or three times."""
        vote = self._build()
        for _ in range(3):
            _, outcome = self._send("/v1/feedback", _body(vote))
            self.history.note(vote.event_id, outcome, vote)
            if outcome != "unknown":
                break

    def _batch(self) -> None:
        votes = [self._build() for _ in range(5)]
        answer, outcome = self._send("/v1/feedback/batch", [_body(vote) for vote in votes])
        told = answer.json()["data"] if answer is not None and outcome == "ok" else [{"status": outcome}] * len(votes)
        for vote, item in zip(votes, told, strict=True):
            each = {"accepted": "ok", "duplicate": "ok", "refused": "unknown"}.get(item["status"], outcome)
            self.history.note(vote.event_id, each, vote)

    def _nonsense(self) -> None:
        vote = self._build()
        _, outcome = self._send("/v1/feedback", _body(vote) | {"value": "sideways", "kind": "thumb"})
        self.history.note(vote.event_id, outcome)

    def _build(self) -> AnyVote:
        kind = self._random.choice(["thumb", "thumb", "rating", "comment", "correction"])
        content = {"value": self._random.choice(["up", "down"])} if kind == "thumb" else {}
        target = self._random.choice(self._responses[-20:])
        return build_vote(kind, response_id=target, rater=f"rater-{self._random.randrange(5)}", **content)

    def _send(self, path: str, body: Any) -> tuple[httpx.Response | None, str]:
        try:
            answer = self._http.post(path, json=body)
        except httpx.ConnectError:
            return None, "failed"  # nobody was there to hear it
        except httpx.TransportError:
            return None, "unknown"
        if answer.status_code < 300:
            return answer, "ok"
        return answer, "failed" if answer.status_code < 500 else "unknown"


def _body(vote: AnyVote) -> dict[str, Any]:
    return vote.model_dump(mode="json", exclude={"api_key_id"}, exclude_none=True)


def what_clients_were_told_is_what_is_stored_whatever_is_killed_or_paused(
    tmp_path: Path, broker: Broker, request: pytest.FixtureRequest
) -> None:
    seconds, seed = (request.config.getoption(name) for name in ("--ledger-seconds", "--ledger-seed"))
    postgres = Postgres(tmp_path / "postgres").start()
    dsn = postgres.new_database()
    settings = ledger_settings(tmp_path / "outbox", broker.bootstrap_servers)
    port = free_port()
    module, told = ["-m", "tests.helpers.ledger_process"], settings.model_dump_json()
    gateway = Victim([*module, "gateway", str(settings.outbox), str(port)]).start()
    relay = Victim([*module, "relay", told, dsn]).start()
    ingests = [Victim([*module, "ingest", told, dsn]).start() for _ in range(2)]
    stop = threading.Event()
    clients = [Client(f"http://127.0.0.1:{port}", seed * CLIENTS + number, stop) for number in range(CLIENTS)]
    try:
        wait_for(lambda: _answers(port))
        for client in clients:
            client.start()
        wait_for(lambda: len(stored_ids(dsn)) > 0)
        processes = {"gateway": gateway, "relay": relay, "ingest": ingests[0], "other ingest": ingests[1]}
        faults = _torment(processes, {"broker": broker, "postgres": postgres}, seconds, random.Random(seed))
        wait_for(lambda: _answers(port))
        time.sleep(2)  # a quiet stretch, so that the last ones started have work to do
        stop.set()
        for client in clients:
            client.join(30)
        wait_for(lambda: (report := audit(settings, dsn)).pending == 0 and report.unread == 0, within_s=90)
        report = audit(settings, dsn)
        assert relay.terminate() == 0
        assert [ingest.terminate() for ingest in ingests] == [0, 0]
        assert _unlike_derived(dsn) == []
        _judge([client.history for client in clients], dsn)
    finally:
        stop.set()
        for victim in (gateway, relay, *ingests):
            victim.resume()
            victim.kill()
        postgres.stop()
    assert report.clean, report
    assert report.dead_lettered == 0
    for victim, name in ((relay, "relay"), *((ingest, "ingest") for ingest in ingests)):
        assert victim.lines[-1].startswith(f"{name} stopped: ")
    print(f"{dict(faults)}; {report}")


def _torment(
    processes: dict[str, Victim], servers: dict[str, Broker | Postgres], seconds: float, draw: random.Random
) -> Counter[str]:
    """Kill or pause one after the other; returns what was done how often."""
    faults: Counter[str] = Counter()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(draw.uniform(*PAUSE_S))
        name = draw.choice([*processes, *processes, *servers])
        if name in processes and draw.random() < 0.5:
            faults[f"pause {name}"] += 1
            processes[name].pause()
            time.sleep(draw.uniform(*FROZEN_S))
            processes[name].resume()
        else:
            faults[f"kill {name}"] += 1
            target = processes.get(name) or servers[name]
            target.kill()
            target.start()
    return faults


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/live", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def _judge(histories: list[History], dsn: str) -> None:
    stored = Counter(stored_ids(dsn))
    assert max(stored.values()) == 1
    votes = {row["event_id"]: row for row in rows(dsn, "select * from feedback")}
    for history in histories:
        assert len(history.ok) > 50
        assert [event_id for event_id in history.ok if not stored[event_id]] == []
        assert [event_id for event_id in history.failed if stored[event_id]] == []
        for event_id, vote in history.ok.items():
            if vote is not None:
                row = votes[event_id]
                assert (row["kind"], row["rater"], row["response_id"]) == (vote.kind, vote.rater, vote.response_id)
                assert row["time"] == vote.time
    known = {event_id for history in histories for event_id in (*history.ok, *history.unknown)}
    assert [event_id for event_id in votes if event_id not in known] == []
    print({name: sum(len(getattr(history, name)) for history in histories) for name in ("ok", "failed", "unknown")})


def _unlike_derived(dsn: str) -> list[dict[str, Any]]:
    """Where the preferences that were kept up to date differ from those derived anew."""
    columns = (
        "preference_id, prompt_hash, kind, tie, chosen_response_id, rejected_response_id, rater, other_rater, source"
    )
    kept = f"select {columns} from preferences where not retracted"
    derived = f"select {columns} from pairs_of(array(select distinct prompt_hash from interactions))"
    return rows(dsn, f"({kept} except {derived}) union all ({derived} except {kept})")
