"""What the store derives from votes: current votes, comparison votes, preferences and snapshots."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from feedback.errors import NothingToLearn, SnapshotCorrupt
from feedback.events import AnyEvent, prompt_hash
from feedback.preferences import count_decided, derive_preferences
from feedback.snapshots import create_snapshot, read_snapshot
from storage.artifacts import MARKER
from storage.errors import ArtifactIncomplete
from storage.postgres import connect
from tests.helpers.events_built import (
    build_comparison,
    build_interaction,
    build_messages,
    build_preference,
    build_thumb,
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
