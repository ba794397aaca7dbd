"""`flywheel bench feedback`: how many votes the ledger takes, and how soon they are in the store.

A platform of its own, everything on (gateway, outbox, relay, broker, ingest, PostgreSQL), on this machine, which also
makes the load. Four parts: single votes as fast as they are acknowledged; batches of 100; votes at a steady rate, of
which one in fifty is looked for in the store every 20 ms; and a log filled beforehand that the ingest empties.
"""

import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from feedback.events import FEEDBACK, new_response_id, uuid7
from feedback.ingest import Ingest
from feedback.records import to_record
from feedback.topics import ensure_topics, make_producer
from flywheel import processes
from flywheel.errors import BenchFailed
from flywheel.handle import Platform
from flywheel.model import prepare_base_model
from flywheel.settings import Settings
from flywheel.state import read_state
from loadtest.vote_client import Answers, VoteConnection
from storage.postgres import connect

CONNECTIONS = 32
BATCH = 100
PROBE_EVERY = 50
LEDGER = ("postgres", "broker", "serving", "relay", "ingest")
_PROBE_PAUSE_S = 0.02
_DRAIN_S = 120.0


def run(settings: Settings, *, seconds: float, rate: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure for `seconds` a part; rate: votes a second of the steady part. Raises BenchFailed, StartFailed."""
    with tempfile.TemporaryDirectory(prefix="fwb") as folder:
        model = prepare_base_model(settings, say).resolve()
        with Platform(Path(folder) / "home", f"serving.model={model}") as platform:
            say("starting the platform")
            platform.start(*LEDGER)
            say("single votes")
            single = asyncio.run(_flood(platform, "/v1/feedback", 1, seconds))
            say("batches")
            batched = asyncio.run(_flood(platform, "/v1/feedback/batch", BATCH, seconds))
            _drain(platform, say)
            memory = _memory_mib(platform)
            say(f"{rate} votes a second")
            steady, delays = asyncio.run(_steady(platform, seconds, rate))
            _drain(platform, say)
            grown = _memory_mib(platform) - memory
            audit = platform.audit_when_drained()
            if not audit["clean"] or audit["pending"]:
                raise BenchFailed(f"the ledger does not add up: {audit}")
            say("from the log to the store")
            platform.stop()
            platform.start("postgres", "broker")
            to_store = _to_store(platform, seconds, say)
    return {
        "seconds": seconds,
        "connections": CONNECTIONS,
        "single_votes_per_s": round(len(single.seconds) / seconds),
        "ack_p50_ms": _ms(single.seconds, 0.5),
        "ack_p99_ms": _ms(single.seconds, 0.99),
        "batch_votes_per_s": round(BATCH * len(batched.seconds) / seconds),
        "batch_ack_p99_ms": _ms(batched.seconds, 0.99),
        "steady_votes_per_s": round(len(steady.seconds) / seconds),
        "steady_ack_p99_ms": _ms(steady.seconds, 0.99),
        "vote_to_store_p50_s": round(_percentile(delays, 0.5), 3),
        "vote_to_store_p99_s": round(_percentile(delays, 0.99), 3),
        "events_per_s_to_store": round(to_store),
        "memory_grown_mib": round(grown, 1),
        "votes": audit["accepted"],
    }


def _votes(count: int) -> list[dict[str, Any]]:
    return [
        {
            "kind": "thumb",
            "event_id": str(uuid7()),
            "response_id": new_response_id(),
            "value": "up",
            "rater": f"rater-{number % 50_000}",
        }
        for number in range(count)
    ]


def _body(size: int) -> tuple[bytes, list[str]]:
    votes = _votes(size)
    return json.dumps(votes if size > 1 else votes[0]).encode(), [vote["event_id"] for vote in votes]


async def _flood(platform: Platform, path: str, size: int, seconds: float) -> Answers:
    """As many as are acknowledged: each connection sends the next when the last was answered."""
    answers = Answers()

    async def one() -> None:
        async with VoteConnection(platform.url, platform.key, path) as connection:
            while time.perf_counter() < ends:
                answers.add(*await connection.post(_body(size)[0]))

    ends = time.perf_counter() + seconds
    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    _check(answers)
    return answers


async def _steady(platform: Platform, seconds: float, rate: int) -> tuple[Answers, list[float]]:
    """Votes at a steady rate, late ones at once; and the seconds from acknowledgement to store of one in fifty."""
    answers, delays = Answers(), []
    waiting: dict[str, float] = {}
    done = threading.Event()
    began = time.perf_counter()
    turns: Iterator[int] = iter(range(int(seconds * rate)))

    async def one() -> None:
        async with VoteConnection(platform.url, platform.key, "/v1/feedback") as connection:
            for turn in turns:
                await asyncio.sleep(max(0.0, began + turn / rate - time.perf_counter()))
                body, [event_id] = _body(1)
                answers.add(*await connection.post(body))
                if turn % PROBE_EVERY == 0:
                    waiting[event_id] = time.perf_counter()

    def look() -> None:
        with connect(platform.dsn, autocommit=True) as connection:
            while waiting or not done.is_set():
                time.sleep(_PROBE_PAUSE_S)
                query = "select event_id from feedback where event_id = any (%s)"
                for row in connection.execute(query, (list(waiting),)):
                    delays.append(time.perf_counter() - waiting.pop(row["event_id"]))

    looking = asyncio.create_task(asyncio.to_thread(look))
    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    done.set()
    await asyncio.wait_for(looking, _DRAIN_S)
    _check(answers)
    return answers, delays


def _to_store(platform: Platform, seconds: float, say: Callable[[str], None]) -> float:
    """Events a second that the ingest, alone with broker and database, takes from a full log for `seconds`."""
    feedback = platform.settings.feedback
    ensure_topics(feedback)
    producer = make_producer(feedback)
    ingest = Ingest(feedback, platform.dsn)
    rates = []
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        votes = [FEEDBACK.validate_python(vote) for vote in _votes(20_000)]
        futures = []
        for vote in votes:
            topic, key, value, headers = to_record(vote)
            futures.append(producer.send(topic, key=key, value=value, headers=headers))
        for future in futures:
            future.get(60)
        stored, began = ingest.counters["inserted"], time.perf_counter()
        while ingest.counters["inserted"] < stored + len(votes):
            ingest.step()
        rates.append(len(votes) / (time.perf_counter() - began))
        say(f"from the log to the store: {rates[-1]:.0f} a second")
    ingest.disconnect()
    producer.close(timeout=5)
    return statistics.median(rates)


def _drain(platform: Platform, say: Callable[[str], None]) -> None:
    say("waiting until everything is stored")
    deadline = time.monotonic() + _DRAIN_S
    while (audit := platform.audit_when_drained())["pending"]:
        if time.monotonic() > deadline:
            raise BenchFailed(f"not everything was stored within {_DRAIN_S:.0f} s: {audit}")


def _check(answers: Answers) -> None:
    if set(answers.statuses) - {202}:
        raise BenchFailed(f"not every vote was accepted: {answers.statuses}")


def _memory_mib(platform: Platform) -> float:
    """Resident memory of relay, ingest, broker and what serves, MiB: PostgreSQL's shared cache fills by design."""
    state = read_state(platform.settings.home)
    assert state is not None, "it was started"
    pids = [state.components[name].pid for name in ("broker", "serving", "relay", "ingest")]
    return sum(one.memory_info().rss for pid in pids if pid is not None for one in processes.tree(pid)) / 2**20


def _ms(seconds: list[float], share: float) -> float:
    return round(1000 * _percentile(seconds, share), 2)


def _percentile(values: list[float], share: float) -> float:
    """By nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
