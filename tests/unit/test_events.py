"""Laws of the event contract: the codec loses nothing, refuses what does not fit, and imports nothing heavy."""

import subprocess
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedback.events import (
    FEEDBACK_TOPIC,
    AnyEvent,
    event_id_of,
    new_comparison_id,
    new_response_id,
    prompt_hash,
    target_of,
    uuid7,
)
from feedback.records import from_record, to_record, topic_of
from tests.helpers.events_built import build_interaction, build_preference, build_thumb, build_vote

ROOT = Path(__file__).parents[2]

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
_name = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50)
_shared: dict[str, Any] = {
    "event_id": st.builds(lambda: str(uuid7())),
    "time": st.datetimes(datetime(2000, 1, 1), datetime(2199, 12, 31), timezones=st.just(UTC)),
    "tags": st.dictionaries(_text, _text, max_size=3),
}
_interactions = st.builds(
    build_interaction,
    **_shared,
    text=st.none() | _text,
    messages=st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": _text}), min_size=1, max_size=3),
    propensity=st.none() | st.floats(0, 1),
    duration_s=st.floats(0, 1e6),
    prompt_tokens=st.none() | st.integers(0, 2**40),
    status=st.sampled_from(["completed", "length", "client_abort", "timeout", "upstream_error"]),
)
_thumbs = st.builds(build_thumb, **_shared, rater=_name, value=st.sampled_from(["up", "down"]))
_others = st.builds(
    build_vote,
    st.sampled_from(["rating", "score", "comment", "correction", "signal"]),
    **_shared,
    rater=_name,
    response_id=st.builds(new_response_id),
) | st.builds(build_vote, st.sampled_from(["thumb", "rating", "score", "comment", "signal"]), session_id=_name)
_preferences = st.builds(
    build_preference, **_shared, rater=_name, chosen=st.none() | st.builds(new_response_id), comparison_id=st.none()
)


@settings(deadline=None, max_examples=150)
@given(_interactions | _thumbs | _others | _preferences)
def every_event_comes_back_from_its_record_as_it_was(event: AnyEvent) -> None:
    topic, key, value, headers = to_record(event)
    assert from_record(topic, value) == event
    assert (topic, key.decode()) == (topic_of(event), target_of(event))
    told = {name: content.decode() for name, content in headers}
    assert told["ce_id"] == event.event_id
    assert told["ce_specversion"] == "1.0"


@settings(deadline=None)
@given(st.binary(max_size=200))
def no_bytes_but_a_value_error_come_out_of_the_codec(value: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (any ValueError is the law)
        from_record(FEEDBACK_TOPIC, value)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"value": "sideways"}, "value"),
        ({"rater": ""}, "rater"),
        ({"response_id": "chatcmpl-1"}, "response_id"),
        ({"event_id": "one"}, "event_id"),
        ({"time": "2026-01-01T00:00:00"}, "time"),
        ({"tags": {"k": "x" * 513}}, "tags"),
        ({"stars": 5}, "stars"),
    ],
)
def a_bad_field_is_refused_by_name(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        build_thumb(**overrides)


def a_preference_names_its_choice_exactly_when_it_has_one() -> None:
    build_preference(chosen=new_response_id())
    build_preference(verdict="both_bad")
    with pytest.raises(ValueError, match="chosen"):
        build_preference(verdict="chosen")
    with pytest.raises(ValueError, match="chosen"):
        build_preference(verdict="tie", chosen=new_response_id())


@pytest.mark.parametrize(
    ("kind", "overrides", "fault"),
    [
        ("thumb", {"session_id": "s", "response_id": new_response_id()}, "name one of"),
        ("thumb", {"response_id": None}, "name one of"),
        ("rating", {"value": 6}, "between 1 and 5"),
        ("rating", {"value": True}, "value"),
        ("rating", {"lowest": 5}, "lowest"),
        ("score", {"value": float("nan")}, "value"),
        ("score", {"value": "0.5"}, "value"),
        ("score", {"name": ""}, "name"),
        ("comment", {"text": ""}, "text"),
        ("comment", {"text": "x" * 100_001}, "text"),
        ("correction", {"session_id": "s"}, "response_id"),
        ("signal", {"name": "sighed"}, "name"),
    ],
)
def a_vote_that_makes_no_sense_is_refused(kind: str, overrides: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        build_vote(kind, **overrides)


def a_choice_is_between_the_answers_of_a_comparison_or_two_others() -> None:
    first, second = new_response_id(), new_response_id()
    forth = build_preference(chosen=first, responses=(first, second))
    back = build_preference(verdict="tie", responses=(second, first))
    assert target_of(forth) == target_of(back), "a changed mind is a revision in whatever order they are named"
    with pytest.raises(ValueError, match="one of `responses`"):
        build_preference(chosen=new_response_id(), responses=(first, second))
    with pytest.raises(ValueError, match="different"):
        build_preference(responses=(first, first))
    with pytest.raises(ValueError, match="two `responses`"):
        build_preference(new_comparison_id(), responses=(first, second))


def every_id_is_a_uuid_of_version_7_and_newer_ones_sort_later() -> None:
    ids = [uuid7() for _ in range(1000)]
    assert {value.version for value in ids} == {7}
    assert {value.variant for value in ids} == {"specified in RFC 4122"}
    assert len(set(ids)) == 1000
    milliseconds = [value.int >> 80 for value in ids]
    assert milliseconds == sorted(milliseconds)
    assert uuid.UUID(event_id_of(f"chatcmpl-{ids[0].hex}")).version == 8
    assert len({event_id_of(f"chatcmpl-{value.hex}") for value in ids}) == 1000
    assert new_comparison_id().startswith("cmp-")


def the_prompt_hash_does_not_depend_on_the_order_of_keys() -> None:
    assert prompt_hash([{"role": "user", "content": "hi"}]) == prompt_hash([{"content": "hi", "role": "user"}])
    assert prompt_hash([{"role": "user", "content": "hi"}]) != prompt_hash([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("module", ["feedback.events", "feedback.outbox"])
def the_contract_and_the_outbox_import_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "heavy = {'ray', 'vllm', 'torch', 'kafka', 'fastapi', 'transformers', 'numpy', 'psycopg', 'pyarrow'}; "
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
