"""What the store derives from votes: current votes, comparison votes, preferences and snapshots."""

import asyncio
import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from feedback.errors import NothingToLearn, SnapshotCorrupt
from feedback.events import AnyEvent, new_response_id, prompt_hash
from feedback.integrity import examine
from feedback.preferences import count_decided, derive_preferences
from feedback.snapshots import create_snapshot, read_snapshot
from feedback.votes import votes_on
from serving.vote_store import VoteStore
from storage.artifacts import MARKER
from storage.errors import ArtifactIncomplete
from storage.postgres import connect
from tests.helpers.events_built import (
    build_comparison,
    build_interaction,
    build_messages,
    build_preference,
    build_thumb,
    build_vote,
)
from tests.helpers.ledger import insert, rows

pytestmark = pytest.mark.real

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


def build_chosen(prompt: str, rater: str = "rater-1", **overrides: Any) -> list[AnyEvent]:
    """A comparison whose first answer was chosen."""
    comparison_id, answers = build_comparison(prompt, (f"good {prompt}", f"bad {prompt}"))
    return [*answers, build_preference(comparison_id, answers[0].response_id, rater=rater, **overrides)]


def the_counts_of_an_insert_add_up(dsn: str) -> None:
    votes = [build_thumb() for _ in range(5)]
    first = insert(dsn, [*votes[:3], votes[0]])
    assert (first.inserted, first.duplicate, first.refused) == (3, 1, [])
    second = insert(dsn, votes)
    assert (second.inserted, second.duplicate, second.refused) == (2, 3, [])


def a_changed_mind_is_a_revision_and_the_latest_by_time_counts_whatever_comes_first(dsn: str) -> None:
    answer = build_interaction()
    late = build_thumb(answer.response_id, value="down", time=NOON + timedelta(seconds=1))
    early = build_thumb(answer.response_id, value="up", time=NOON)
    other = build_thumb(answer.response_id, value="up", time=NOON, rater="rater-2")
    insert(dsn, [late, early, other])
    current = rows(dsn, "select rater, value from current_votes order by rater")
    assert current == [{"rater": "rater-1", "value": "down"}, {"rater": "rater-2", "value": "up"}]
    assert len(rows(dsn, "select event_id from feedback")) == 3


def a_vote_waits_for_its_answers_and_joins_when_they_come(dsn: str) -> None:
    first, second, vote = build_chosen("a prompt")
    insert(dsn, [vote, first])
    assert rows(dsn, "select * from comparison_votes") == []
    insert(dsn, [second])
    (joined,) = rows(dsn, "select * from comparison_votes")
    assert joined["vote_id"] == vote.event_id
    assert (joined["chosen_checkpoint_id"], joined["rejected_checkpoint_id"]) == (
        "flash-r0000-000000",
        "flash-r0001-111111",
    )
    with connect(dsn) as connection:
        assert count_decided(connection) == 1


@pytest.mark.parametrize(("verdict", "pairs"), [("tie", 1), ("both_bad", 0)])
def a_vote_without_a_winner_has_no_chosen_side(dsn: str, verdict: str, pairs: int) -> None:
    comparison_id, answers = build_comparison()
    insert(dsn, [*answers, build_preference(comparison_id, verdict=verdict)])
    (vote,) = rows(dsn, "select * from comparison_votes")
    assert vote["chosen_response_id"] is vote["rejected_response_id"] is vote["chosen_checkpoint_id"] is None
    assert (vote["checkpoint_a"], vote["checkpoint_b"]) == ("flash-r0000-000000", "flash-r0001-111111")
    with connect(dsn) as connection:
        assert count_decided(connection) == 0
        assert [preference.tie for preference in derive_preferences(connection)] == [True] * pairs


def a_choice_of_a_response_from_elsewhere_is_no_comparison_vote(dsn: str) -> None:
    comparison_id, answers = build_comparison()
    stranger = build_interaction()
    insert(dsn, [*answers, stranger, build_preference(comparison_id, stranger.response_id)])
    assert rows(dsn, "select * from comparison_votes") == []


def an_answer_voted_up_beats_one_voted_down_within_one_prompt_only(dsn: str) -> None:
    up = build_interaction(messages=build_messages("one"), text="good")
    down = build_interaction(messages=build_messages("one"), text="bad")
    torn = build_interaction(messages=build_messages("one"), text="disputed")
    elsewhere = build_interaction(messages=build_messages("two"), text="bad elsewhere")
    insert(
        dsn,
        [
            *(up, down, torn, elsewhere),
            build_thumb(up.response_id, value="up", rater="rater-1"),
            build_thumb(down.response_id, value="down", rater="rater-2"),
            build_thumb(elsewhere.response_id, value="down", rater="rater-2"),
            build_thumb(torn.response_id, value="up", rater="rater-1"),
            build_thumb(torn.response_id, value="down", rater="rater-2"),
        ],
    )
    with connect(dsn) as connection:
        (pair,) = derive_preferences(connection)
    assert (pair.chosen_text, pair.rejected_text, pair.kind) == ("good", "bad", "thumbs")
    assert (pair.rater, pair.other_rater) == ("rater-1", "rater-2")


def a_correction_beats_the_answer_that_it_corrects(dsn: str) -> None:
    answer = build_interaction(text="Lyon.")
    insert(dsn, [build_vote("correction", response_id=answer.response_id, text="Paris."), answer])
    insert(dsn, [build_vote("correction", response_id=answer.response_id, text="Lyon.", rater="rater-2")])
    with connect(dsn) as connection:
        (pair,) = derive_preferences(connection)
    assert (pair.chosen_text, pair.rejected_text, pair.kind) == ("Paris.", "Lyon.", "correction")
    assert (pair.chosen_response_id, pair.rejected_response_id) == (None, answer.response_id)


def a_choice_between_any_two_answers_to_one_prompt_is_a_preference(dsn: str) -> None:
    one, two = (build_interaction(messages=build_messages("one"), text=text) for text in ("good", "bad"))
    elsewhere = build_interaction(messages=build_messages("two"), text="elsewhere")
    insert(
        dsn,
        [build_preference(chosen=two.response_id, responses=(one.response_id, two.response_id), time=NOON), one, two],
    )
    insert(
        dsn, [elsewhere, build_preference(chosen=one.response_id, responses=(one.response_id, elsewhere.response_id))]
    )
    with connect(dsn) as connection:
        assert [pair.chosen_text for pair in derive_preferences(connection)] == ["bad"]
    insert(dsn, [build_preference(chosen=one.response_id, responses=(two.response_id, one.response_id))])
    with connect(dsn) as connection:
        assert [pair.chosen_text for pair in derive_preferences(connection)] == ["good"]


def the_kinds_that_say_nothing_about_pairs_are_kept_as_they_came(dsn: str) -> None:
    answer = build_interaction()
    on_it = {"response_id": answer.response_id}
    votes = [build_vote(kind, **on_it) for kind in ("rating", "score", "comment", "correction", "signal", "thumb")]
    votes.append(build_vote("score", **on_it, name="brevity", value=1e-300))
    insert(dsn, [answer, *votes])
    with connect(dsn) as connection:
        read = votes_on(connection, answer.response_id, "")
        assert votes_on(connection, answer.response_id, "key-2") == []
    expected = [vote.model_dump(mode="json", exclude_none=True) | {"current": True} for vote in votes]
    assert sorted(read, key=lambda vote: vote["event_id"]) == sorted(expected, key=lambda vote: vote["event_id"])


def two_metrics_are_two_subjects_and_a_new_value_of_one_revises_it(dsn: str) -> None:
    response_id = build_interaction().response_id
    scores = [("truth", 0.1), ("style", 0.2), ("truth", 0.3)]
    for second, (name, value) in enumerate(scores):
        time = NOON + timedelta(seconds=second)
        insert(dsn, [build_vote("score", response_id=response_id, name=name, value=value, time=time)])
    current = rows(dsn, "select name, value from current_votes order by name")
    assert current == [{"name": "style", "value": "0.2"}, {"name": "truth", "value": "0.3"}]
    with connect(dsn) as connection:
        assert [vote["current"] for vote in votes_on(connection, response_id, "")] == [False, True, True]


@pytest.mark.parametrize("seed", range(6))
def the_preferences_kept_up_to_date_are_those_derived_anew_whatever_the_order(dsn: str, seed: int) -> None:
    """Random answers and votes, in random order and batches, with changed minds."""
    draw = random.Random(seed)
    events: list[AnyEvent] = []
    for prompt in ("one", "two", "three"):
        comparison_id, answers = build_comparison(prompt, ("a", draw.choice("ab")))
        answers += [build_interaction(messages=build_messages(prompt), text=draw.choice("abc")) for _ in range(4)]
        events += answers
        for _ in range(40):
            first, second = draw.sample(answers, 2)
            some: dict[str, Any] = {
                "rater": f"rater-{draw.randrange(3)}",
                "time": NOON + timedelta(seconds=draw.randrange(1000)),
            }
            choice = draw.choice(["chosen", "tie", "both_bad"])
            match draw.randrange(4):
                case 0:
                    events.append(build_thumb(first.response_id, value=draw.choice(["up", "down"]), **some))
                case 1:
                    events.append(
                        build_vote("correction", response_id=first.response_id, text=draw.choice("abcd"), **some)
                    )
                case 2:
                    chosen = draw.choice(answers[:2]).response_id if choice == "chosen" else None
                    events.append(build_preference(comparison_id, chosen, verdict=choice, **some))
                case 3:
                    chosen = first.response_id if choice == "chosen" else None
                    named = (first.response_id, second.response_id)
                    events.append(build_preference(None, chosen, verdict=choice, responses=named, **some))
    draw.shuffle(events)
    while events:
        size = draw.randint(1, 20)
        insert(dsn, events[:size])
        del events[:size]
    columns = (
        "preference_id, prompt_hash, kind, tie, chosen_response_id, rejected_response_id, rater, other_rater, source"
    )
    kept = rows(dsn, f"select {columns} from preferences where not retracted order by 1")
    anew = f"select {columns} from pairs_of(array(select distinct prompt_hash from interactions)) order by 1"
    assert kept == rows(dsn, anew)
    assert {row["kind"] for row in kept} == {"stated", "correction", "thumbs"}
    assert rows(dsn, "select refresh_preferences(array(select distinct prompt_hash from interactions)) as changed") == [
        {"changed": 0}
    ]


def a_retracted_pair_that_comes_back_has_a_newer_revision(dsn: str) -> None:
    comparison_id, answers = build_comparison()
    for second, verdict in enumerate(["tie", "both_bad", "tie"]):
        insert(dsn, [*answers, build_preference(comparison_id, verdict=verdict, time=NOON + timedelta(seconds=second))])
    found = rows(dsn, "select retracted, revision from preferences order by changed_at")
    assert found == [{"retracted": True, "revision": 2}, {"retracted": False, "revision": 1}]


def no_answer_whose_content_was_not_kept_is_learnt_from(dsn: str) -> None:
    comparison_id, answers = build_comparison()
    hidden = answers[1].model_copy(update={"content_kept": False, "messages": None, "text": None})
    insert(dsn, [answers[0], hidden, build_preference(comparison_id, answers[0].response_id)])
    with connect(dsn) as connection:
        assert derive_preferences(connection) == []


def no_rater_can_dominate(dsn: str) -> None:
    events = [event for number in range(80) for event in build_chosen(f"prompt {number}", rater="loud")]
    for number in range(20):
        events += build_chosen(f"quiet prompt {number}", rater=f"quiet-{number}")
    insert(dsn, events)
    with connect(dsn) as connection:
        weights = {preference.rater: preference.weight for preference in derive_preferences(connection)}
    assert weights.pop("loud") == pytest.approx(0.1 * 100 / 80)
    assert set(weights.values()) == {1.0}


def a_lone_rater_has_full_weight(dsn: str) -> None:
    insert(dsn, build_chosen("one") + build_chosen("two"))
    with connect(dsn) as connection:
        assert [preference.weight for preference in derive_preferences(connection)] == [1.0, 1.0]


def a_snapshot_keeps_each_prompt_on_one_side_and_is_readable_by_trl(dsn: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    insert(dsn, [event for number in range(60) for event in build_chosen(f"prompt {number % 30}")])
    snapshot = create_snapshot(dsn, tmp_path)
    sides = [{pair.prompt_hash for pair in side} for side in (snapshot.train, snapshot.heldout)]
    assert sides[0]
    assert sides[1]
    assert not sides[0] & sides[1]
    assert snapshot.manifest["pairs"] == 60
    assert read_snapshot(snapshot.path) == snapshot
    row = pq.read_table(snapshot.path / "train.parquet").to_pylist()[0]
    assert row["prompt"] == snapshot.train[0].prompt
    assert row["chosen"] == [{"role": "assistant", "content": snapshot.train[0].chosen}]
    listed = rows(dsn, "select snapshot_id, digest, path from snapshots")
    assert listed == [
        {
            "snapshot_id": snapshot.snapshot_id,
            "digest": snapshot.manifest["content_sha256"],
            "path": str(snapshot.path),
        }
    ]


def a_prompt_that_was_held_out_stays_held_out_when_votes_are_added(dsn: str, tmp_path: Path) -> None:
    insert(dsn, [event for number in range(20) for event in build_chosen(f"prompt {number}")])
    before = {pair.prompt_hash for pair in create_snapshot(dsn, tmp_path).heldout}
    insert(dsn, [event for number in range(10, 40) for event in build_chosen(f"prompt {number}", rater="rater-2")])
    after = create_snapshot(dsn, tmp_path)
    assert before <= {pair.prompt_hash for pair in after.heldout}
    assert not before & {pair.prompt_hash for pair in after.train}


def a_snapshot_of_nothing_is_refused(dsn: str, tmp_path: Path) -> None:
    with pytest.raises(NothingToLearn):
        create_snapshot(dsn, tmp_path)


def a_snapshot_that_was_changed_or_not_finished_is_not_read(dsn: str, tmp_path: Path) -> None:
    insert(dsn, build_chosen("one") + build_chosen("two"))
    path = create_snapshot(dsn, tmp_path).path
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"content_sha256": "0" * 64}))
    with pytest.raises(SnapshotCorrupt):
        read_snapshot(path)
    (path / MARKER).unlink()
    with pytest.raises(ArtifactIncomplete):
        read_snapshot(path)


def one_text_sent_in_several_ways_is_one_prompt_and_odd_parts_are_left_out(dsn: str, tmp_path: Path) -> None:
    shapes: list[Any] = [
        "How?",
        [{"type": "text", "text": "How?"}],
        [{"type": "text", "text": "Ho"}, {"type": "text", "text": "w?"}, {"type": "refusal", "text": None}],
    ]
    for number, content in enumerate(shapes):
        comparison_id, answers = build_comparison("How?", (f"good {number}", f"bad {number}"))
        messages = [{"role": "user", "content": content}]
        asked = [
            answer.model_copy(update={"messages": messages, "prompt_hash": prompt_hash(messages)}) for answer in answers
        ]
        insert(dsn, [*asked, build_preference(comparison_id, answers[0].response_id, rater=f"rater-{number}")])
    frozen = create_snapshot(dsn, tmp_path)
    pairs = [*frozen.train, *frozen.heldout]
    assert len(pairs) == 3
    assert {pair.prompt[0]["content"] for pair in pairs} == {"How?"}
    assert len({pair.prompt_hash for pair in pairs}) == 1
    assert not (frozen.train and frozen.heldout)


def the_report_on_integrity_says_what_it_takes_to_turn_a_comparison(dsn: str) -> None:
    for number in range(10):
        comparison, answers = build_comparison(f"prompt {number}")
        chosen = answers[0 if number < 7 else 1].response_id
        insert(dsn, [*answers, build_preference(comparison, chosen, rater="busy" if number < 4 else f"r{number}")])
    tied, pair = build_comparison("another prompt")
    same, twins = build_comparison("twins", checkpoints=("flash-r0000-000000", "flash-r0000-000000"))
    insert(dsn, [*pair, build_preference(tied), *twins, build_preference(same, twins[0].response_id)])
    texts = ("This answer is simply WRONG!", "this answer is simply wrong", "Another remark of mine")
    insert(dsn, [build_vote("comment", text=text, rater=f"bot-{number}") for number, text in enumerate(texts)])
    with connect(dsn) as connection:
        found = examine(connection)
    [contest] = found.contests
    assert (contest.leader_wins, contest.other_wins, contest.ties, contest.raters) == (7, 3, 1, 8)
    assert (contest.changed_votes, contest.added_votes, contest.rigged_raters) == (3, 5, 1)
    [repeated] = found.repeated_texts
    assert (repeated.votes, repeated.raters) == (2, 2)
    assert (found.busiest_raters[0].rater, found.busiest_raters[0].votes) == ("busy", 4)


def an_event_that_no_index_can_hold_is_refused_and_harms_no_other(dsn: str) -> None:
    draw = random.Random(1)
    unindexable = build_interaction(user="".join(chr(draw.randrange(0x20000, 0x2A000)) for _ in range(4_000)))
    written = insert(dsn, [unindexable, vote := build_thumb()])
    assert (written.inserted, len(written.refused)) == (1, 1)
    assert rows(dsn, "select event_id from feedback") == [{"event_id": vote.event_id}]


def the_longest_names_that_a_vote_may_have_can_be_stored(dsn: str) -> None:
    draw = random.Random(1)
    names = ["".join(chr(draw.randrange(0x20000, 0x2A000)) for _ in range(128)) for _ in range(3)]
    vote = build_vote("score", name=names[0], rater=names[1], session_id=names[2])
    assert insert(dsn, [vote]).inserted == 1


def an_event_with_the_id_of_another_is_refused_and_a_retry_keeps_the_earliest_time(dsn: str) -> None:
    answer = build_interaction()
    vote = build_thumb(answer.response_id, time=NOON + timedelta(seconds=2))
    revision = build_thumb(answer.response_id, value="down", time=NOON + timedelta(seconds=1))
    retry = vote.model_copy(update={"time": NOON})
    other = vote.model_copy(update={"value": "down"})
    assert insert(dsn, [answer, vote]).inserted == 2
    written = insert(dsn, [other, retry, revision])
    assert (written.inserted, written.duplicate) == (1, 1)
    [refusal] = written.refused
    assert b'"down"' in (refusal.record.value or b"")
    [current] = rows(dsn, "select value, time from current_votes")
    assert current["value"] == "down"  # the mind was changed after the vote that came again
    together = [build_thumb(value="up"), build_thumb()]
    together[1] = together[0].model_copy(update={"value": "down"})
    assert [len(insert(dsn, together).refused) for _ in range(2)] == [1, 1]


def a_second_answer_at_the_same_place_of_a_comparison_is_refused(dsn: str) -> None:
    comparison, answers = build_comparison()
    third = build_interaction(comparison_id=comparison, position=1, text="No.")
    vote = build_preference(comparison, answers[0].response_id)
    written = insert(dsn, [*answers, third, vote])
    assert (written.inserted, len(written.refused)) == (3, 1)
    with connect(dsn) as connection:
        assert len(derive_preferences(connection)) == 1


async def a_reader_who_leaves_does_not_break_the_reading_of_others(dsn: str) -> None:
    insert(dsn, [build_thumb(answer := new_response_id(), api_key_id="key-1")])
    store = VoteStore(dsn)
    slow = [
        asyncio.create_task(store._questions.ask(lambda c: c.execute("select pg_sleep(0.3)").fetchall()))
        for _ in range(3)
    ]
    await asyncio.sleep(0.1)
    for task in slow:
        task.cancel()
    for _ in range(3):
        [vote] = await store.votes_on(answer, "key-1")
        assert vote["current"]
    assert (await store.erase("rater-1"))["votes"] == 1
    assert await store.votes_on(answer, "key-1") == []
    store.close()
