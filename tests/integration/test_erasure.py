"""Erasure and retention: what goes, what stays, and that nothing of it comes back."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from feedback.audit import audit
from feedback.erasure import Eraser, erase, expire, subject_of
from feedback.events import (
    CHECKPOINTS_TOPIC,
    FEEDBACK_TOPIC,
    INTERACTIONS_TOPIC,
    PREFERENCES_TOPIC,
    AnyEvent,
    Interaction,
    Preference,
)
from feedback.ingest import Ingest
from feedback.outbox_file import open_files
from feedback.preferences import derive_preferences
from feedback.records import is_tombstone
from feedback.relay import Relay
from feedback.snapshots import create_snapshot
from feedback.topics import Logs
from serving.registry import Checkpoint, register_checkpoint, retire_checkpoint
from storage.postgres import connect
from tests.helpers.events_built import build_comparison, build_interaction, build_preference, build_thumb, build_vote
from tests.helpers.ledger import accept, insert, ledger_settings, read_topic, rows, running, stored_ids, wait_for
from tests.helpers.servers import Broker

pytestmark = pytest.mark.real

SECRET = "the diary of Zoe, page 7"


def build_life(name: str, prompt: str = SECRET) -> list[AnyEvent]:
    """All that a person leaves: a comparison with a choice, an answer with a thumb, and a correction of it."""
    comparison, pair = build_comparison(prompt, (f"{prompt}, short", f"{prompt}, long"), user=name)
    answer = build_interaction(text=prompt, user=name)
    return [
        *pair,
        answer,
        build_preference(comparison, pair[0].response_id, rater=name),
        build_thumb(answer.response_id, rater=name),
        build_vote("correction", text=f"{prompt}, rather", response_id=answer.response_id, rater=name),
    ]


def everything_in(dsn: str) -> str:
    """All rows of all tables of the ledger as text."""
    tables = (
        "interactions",
        "feedback",
        "preferences",
        "dead_letters",
        "erasures",
        "erased_events",
        "outgoing_records",
    )
    return json.dumps([rows(dsn, f"select * from {table}") for table in tables], default=str)


def erase_now(dsn: str, name: str) -> dict[str, object]:
    with connect(dsn) as connection:
        return erase(connection, name).model_dump()


def a_person_who_is_erased_leaves_no_word_and_no_vote_and_others_keep_theirs(dsn: str) -> None:
    zoe, ben = build_life("zoe"), build_life("ben", "a question of Ben's")
    on_ben = build_thumb(ben[2].response_id if isinstance(ben[2], Interaction) else None, rater="zoe", value="down")
    on_ada = build_vote("comment", text="I know her", response_id=next(_answers(zoe)).response_id, rater="ben")
    insert(dsn, [*zoe, *ben, on_ben, on_ada])
    erased = erase_now(dsn, "zoe")
    assert (erased["interactions"], erased["votes"]) == (3, 5)
    left = everything_in(dsn)
    assert "zoe" not in left
    assert "diary" not in left
    assert sorted(stored_ids(dsn)) == sorted(event.event_id for event in ben)
    with connect(dsn) as connection:
        assert {preference.rater for preference in derive_preferences(connection)} == {"ben"}


def what_was_erased_stays_away_when_it_comes_late_or_again(dsn: str) -> None:
    life = build_life("zoe")
    before = datetime.now(UTC)
    insert(dsn, life[:4])
    erase_now(dsn, "zoe")
    late = build_thumb(rater="zoe", time=before)
    by_another = build_thumb(next(_answers(life)).response_id, rater="ben")
    written = insert(dsn, [*life, late, by_another])
    assert (written.inserted, written.duplicate, written.erased) == (0, 0, len(life) + 2)
    back = build_thumb(rater="zoe", time=datetime.now(UTC) + timedelta(seconds=1))
    assert insert(dsn, [back]).inserted == 1
    assert stored_ids(dsn) == [back.event_id]


def a_name_of_any_kind_can_be_erased_twice(dsn: str) -> None:
    for name in ("", "a\0b", "ü/'; drop table feedback; --", "x" * 256, "%", "100%s"):
        vote = build_thumb(rater=name or "nobody")
        insert(dsn, [vote])
        assert erase_now(dsn, name or "nobody")["votes"] == 1
        assert erase_now(dsn, name or "nobody")["votes"] == 0
    assert stored_ids(dsn) == []


def an_erasure_reaches_the_outbox_and_the_topics_and_the_counts_add_up(
    tmp_path: Path, broker: Broker, dsn: str
) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers, erase_poll_s=0.2)
    zoe, ben = build_life("zoe"), build_life("ben", "a question of Ben's")
    accept(tmp_path, [*zoe, *ben])
    with running(settings, dsn):
        wait_for(lambda: len(stored_ids(dsn)) == len(zoe) + len(ben))
        wait_for(lambda: not rows(dsn, "select from preferences where published_log_id is null"))
        erase_now(dsn, "zoe")
        wait_for(lambda: audit(settings, dsn).erased == len(zoe))
        wait_for(lambda: not rows(dsn, "select from outgoing_records where published_log_id is null"))
        wait_for(lambda: not rows(dsn, "select from preferences where published_log_id is null"))
        wait_for(lambda: all(b"diary" not in path.read_bytes() for path in tmp_path.iterdir() if path.is_file()))
        assert accept(tmp_path, zoe[:2]) == ["duplicate", "duplicate"]
        wait_for(lambda: audit(settings, dsn).unread == 0)
        report = audit(settings, dsn)
    assert report.clean, report
    assert (report.accepted, report.stored, report.erased) == (len(zoe) + len(ben), len(ben), len(zoe))
    assert report.dead_lettered == 0
    told = {
        dict(record.headers)["ce_subject"].decode()
        for topic, count in ((INTERACTIONS_TOPIC, 9), (FEEDBACK_TOPIC, 9))
        for record in read_topic(settings, topic, count=count)
        if is_tombstone(record.value, record.headers)
    }
    assert told == {event.event_id for event in zoe}
    said = [Preference.model_validate_json(r.value) for r in read_topic(settings, PREFERENCES_TOPIC, count=6)]
    last = {preference.preference_id: preference for preference in said}
    assert sorted(p.retracted for p in last.values()) == [False, False, True, True]
    assert all("zoe" not in p.model_dump_json() for p in last.values() if p.retracted)


def what_waits_for_the_log_is_erased_before_it_is_sent(tmp_path: Path, broker: Broker, dsn: str) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers)
    zoe, ben = build_life("zoe"), build_life("ben", "a question of Ben's")
    accept(tmp_path, [*zoe, *ben])
    erase_now(dsn, "zoe")
    eraser = Eraser(tmp_path, 3600)
    with connect(dsn) as connection:
        assert eraser.step(connection) == len(zoe)
        assert eraser.step(connection) == 0
    relay = Relay(settings)
    while relay.step():
        pass
    relay.close()
    assert relay.counters["sent"] == len(ben)
    report = audit(settings, dsn)
    assert (report.erased, report.pending, report.clean) == (len(zoe), len(ben), True)
    for file in open_files(tmp_path):
        assert file.revive() == 0
        assert file.redrive(INTERACTIONS_TOPIC, "another log") == 3


def an_erasure_names_what_had_learnt_from_the_person(tmp_path: Path, dsn: str) -> None:
    insert(dsn, [*build_life("zoe"), *build_life("ben", "a question of Ben's")])
    first = create_snapshot(dsn, tmp_path).snapshot_id
    with connect(dsn) as connection:
        connection.execute(
            "insert into reward_models (reward_model_id, snapshot_id, path, digest, manifest, report, released)"
            " values ('rm-1', %s, '', '', '{}', '{}', true)",
            (first,),
        )
        for name, parent, manifest in (
            ("base", None, {}),
            ("learnt", "base", {"snapshot_id": first}),
            ("child", "learnt", {"snapshot_id": "another"}),
            ("other", "base", {"snapshot_id": "another"}),
        ):
            kind = "adapter" if parent else "model"
            fields = {"kind": kind, "parent_id": parent, "digest": name, "path": "", "manifest": manifest}
            register_checkpoint(connection, Checkpoint(checkpoint_id=name, **fields))
    erased = erase_now(dsn, "zoe")
    assert erased["snapshots"] == [first]
    assert erased["reward_models"] == ["rm-1"]
    assert erased["checkpoints"] == ["child", "learnt"]
    second = create_snapshot(dsn, tmp_path).snapshot_id
    assert second != first
    again = erase_now(dsn, "zoe")
    assert again["snapshots"] == [first]
    assert erase_now(dsn, "nobody we know")["snapshots"] == []
    subjects = rows(dsn, f"select subject from snapshot_subjects where snapshot_id = '{second}'")
    assert subjects == [{"subject": subject_of("ben")}]


def what_becomes_of_a_checkpoint_is_told_on_its_topic(tmp_path: Path, broker: Broker, dsn: str) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers)
    ingest = Ingest(settings, dsn)
    with connect(dsn) as connection:
        for _ in range(2):
            register_checkpoint(
                connection,
                Checkpoint(checkpoint_id="c1", kind="model", parent_id=None, digest="d", path="", manifest={}),
            )
        retire_checkpoint(connection, "c1")
        retire_checkpoint(connection, "c1")
    for round_ in range(2):
        while ingest.step() or rows(dsn, "select from outgoing_records where published_log_id is null"):
            pass
        told = [json.loads(record.value) for record in read_topic(settings, CHECKPOINTS_TOPIC, count=2)]
        assert [(event["kind"], event["checkpoint_id"]) for event in told] == [("registered", "c1"), ("retired", "c1")]
        ingest.disconnect()
        if not round_:
            broker.restart_empty()  # another log hears all of it again
            logs = Logs(settings)
            logs.ensure()
            logs.close()


def what_is_older_than_the_retention_goes_with_the_votes_on_it(dsn: str) -> None:
    old, new = build_life("zoe"), build_life("ben", "a question of Ben's")
    insert(dsn, [*old, *new])
    vote_on_old = build_thumb(next(_answers(old)).response_id, rater="ben")
    insert(dsn, [vote_on_old])
    with connect(dsn) as connection:
        for table in ("interactions", "feedback"):
            connection.execute(
                f"update {table} set ingested_at = now() - interval '10 days' where event_id = any (%s)",
                ([event.event_id for event in old],),
            )
        assert expire(connection, 9 * 86400.0, 2) == 5  # two answers with their votes, and two votes, at most
        while expire(connection, 9 * 86400.0, 2):
            pass
    assert sorted(stored_ids(dsn)) == sorted(event.event_id for event in new)
    assert "zoe" not in everything_in(dsn)


def _answers(events: list[AnyEvent]):  # type: ignore[no-untyped-def]
    return (event for event in events if isinstance(event, Interaction))
