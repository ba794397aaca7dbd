"""`flywheel bench preferences`: what new votes and a snapshot cost in a store that holds many.

PostgreSQL alone, filled with comparisons of two answers and a vote on each, four to a prompt. At each size a batch of
new ones is stored as the ingest does it, pairs and all, and a snapshot is made.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from feedback.events import AnyEvent, Choice, Interaction, event_id_of, new_comparison_id, new_response_id, prompt_hash
from feedback.records import to_record
from feedback.snapshots import create_snapshot
from feedback.store import Incoming, insert_events
from flywheel.handle import Platform
from flywheel.setup import migrate_database
from storage.postgres import Connection, connect

BATCH = 500
_FILLED_AT_ONCE = 20_000
_TIMES = 5


def run(*, sizes: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure at each of `sizes` (votes in the store, ascending). Raises StartFailed."""
    by_size: dict[int, dict[str, float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="fwb") as folder,
        Platform(Path(folder) / "home") as platform,
    ):
        platform.start("postgres")
        migrate_database(platform.settings)
        held = 0
        for size in sizes:
            say(f"filling the store with {size} votes")
            with connect(platform.dsn, autocommit=True) as connection:
                _fill(connection, held, size)
                held = size
                say(f"new votes beside {size}")
                seconds = [_store_new(connection, number) for number in range(_TIMES)]
            say(f"a snapshot of {size}")
            began = time.perf_counter()
            snapshot = create_snapshot(platform.dsn, platform.artifacts)
            by_size[size] = {
                "new_votes_ms_each": round(1000 * statistics.median(seconds) / BATCH, 3),
                "snapshot_s": round(time.perf_counter() - began, 2),
                "pairs": snapshot.manifest["pairs"],
            }
    smallest, largest = by_size[sizes[0]], by_size[sizes[-1]]
    return {
        "batch": BATCH,
        "sizes": by_size,
        "new_votes_growth": round(largest["new_votes_ms_each"] / smallest["new_votes_ms_each"], 2),
    }


def _fill(connection: Connection, held: int, size: int) -> None:
    for first in range(held, size, _FILLED_AT_ONCE):
        limits = {"first": first, "last": min(first + _FILLED_AT_ONCE, size) - 1}
        for statement in (_ANSWERS, _VOTES, _PAIRS):
            connection.execute(statement, limits)
    connection.execute("vacuum analyze")


def _store_new(connection: Connection, number: int) -> float:
    """Seconds for a batch of comparisons that nobody has voted on before, with their votes."""
    events: list[AnyEvent] = []
    for index in range(BATCH):
        messages = [{"role": "user", "content": f"new question {number}/{index}"}]
        comparison = new_comparison_id()
        pair = [_answer(messages, comparison, position) for position in (0, 1)]
        vote = {"kind": "preference", "comparison_id": comparison, "rater": "someone", "chosen": pair[0].response_id}
        events += [*pair, Choice.model_validate(vote)]
    incoming = [
        (Incoming(topic, 0, "bench", 0, key, value, headers), event)
        for event in events
        for topic, key, value, headers in [to_record(event)]
    ]
    began = time.perf_counter()
    with connection.transaction():
        written = insert_events(connection, incoming)
    assert written.inserted == len(events)
    return time.perf_counter() - began


def _answer(messages: list[dict[str, Any]], comparison: str, position: int) -> Interaction:
    response_id = new_response_id()
    return Interaction.model_validate(
        {
            "event_id": event_id_of(response_id),
            "response_id": response_id,
            "endpoint": "/v1/comparisons",
            "checkpoint_id": "bench",
            "comparison_id": comparison,
            "position": position,
            "prompt_hash": prompt_hash(messages),
            "messages": messages,
            "text": f"answer {position}",
            "status": "completed",
            "duration_s": 0.0,
        }
    )


_ANSWERS = """
insert into interactions (
    event_id, "time", api_key_id, response_id, endpoint, checkpoint_id, pinned, comparison_id, position, tags,
    content_kept, prompt_hash, messages, parameters, text, status, duration_s
)
select
    gen_random_uuid()::text, now(), '', 'chatcmpl-' || md5(n || '/' || position), '/v1/comparisons', 'bench', false,
    'cmp-' || md5(n::text), position, '{}', true, encode(sha256((n / 4)::text::bytea), 'hex'),
    jsonb_build_array(jsonb_build_object('role', 'user', 'content', 'question ' || n / 4 || repeat(' and so on', 10))),
    '{}', 'answer ' || n || '/' || position || repeat(' word', 30), 'completed', 0
from generate_series(%(first)s::int, %(last)s::int) as n, (values (0), (1)) as places (position)
"""
_VOTES = """
insert into feedback (event_id, "time", api_key_id, kind, rater, source, tags, comparison_id, verdict, chosen)
select
    gen_random_uuid()::text, now(), '', 'preference', 'rater-' || n %% 1000, 'human', '{}', 'cmp-' || md5(n::text),
    'chosen', 'chatcmpl-' || md5(n || '/' || n %% 2)
from generate_series(%(first)s::int, %(last)s::int) as n
"""
_PAIRS = """
select refresh_preferences(array(
    select distinct encode(sha256((n / 4)::text::bytea), 'hex') from generate_series(%(first)s::int, %(last)s::int) as n
))
"""
