"""The live preference topic as an iterable for trainers.

    datasets.IterableDataset.from_generator(
        stream_preferences, gen_kwargs={"bootstrap_servers": "127.0.0.1:19092", "idle_timeout_s": 60.0}
    )

gives rows in TRL's conversational preference format as people vote. Guarantees: every preference that was published
after `position` comes, in order of its revisions; resuming from a row's own `position` skips nothing. Non-guarantees:
a revision can come twice, hardly within one stream; a preference that changed comes again with a higher `revision`, and
one that the votes took back comes with `retracted`; who wants only what holds now trains on a snapshot.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from feedback.errors import LogChanged
from feedback.events import PREFERENCES_TOPIC, Preference
from feedback.settings import FeedbackSettings
from feedback.topics import Logs, open_client, reaching_the_log

_POLL_MS = 500
_REMEMBERED = 100_000


def stream_preferences(
    bootstrap_servers: str, position: str | None = None, idle_timeout_s: float | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each preference: `prompt`, `chosen`, `rejected` (lists of messages), tie, retracted and ids.

    position: a row's `position`, to go on behind it; from the beginning without one. idle_timeout_s: end after so long
    without a new one; else wait for ever. Of a retracted preference the messages are empty.
    Raises LogUnreachable, and LogChanged when the position belongs to a log that is gone: start without one.
    """
    from kafka import KafkaConsumer, TopicPartition

    settings = FeedbackSettings(bootstrap_servers=bootstrap_servers)
    logs = Logs(settings)
    seen: OrderedDict[str, int] = OrderedDict()
    try:
        logs.ensure((PREFERENCES_TOPIC,))
        log = logs.current((PREFERENCES_TOPIC,))[PREFERENCES_TOPIC]
        offsets = dict.fromkeys(log.partitions, 0) | _read_position(position, log.log_id)
        consumer = open_client(KafkaConsumer, settings, enable_auto_commit=False, auto_offset_reset="earliest")
        try:
            consumer.assign([TopicPartition(PREFERENCES_TOPIC, number) for number in offsets])
            for number, offset in offsets.items():
                consumer.seek(TopicPartition(PREFERENCES_TOPIC, number), offset)
            heard_at = time.monotonic()
            while idle_timeout_s is None or time.monotonic() - heard_at < idle_timeout_s:
                with reaching_the_log():
                    polled = consumer.poll(timeout_ms=_POLL_MS)
                if logs.current((PREFERENCES_TOPIC,))[PREFERENCES_TOPIC] != log:
                    raise LogChanged("the log of preferences is another one by now; start again without a position")
                for records in polled.values():
                    heard_at = time.monotonic()
                    for record in records:
                        offsets[record.partition] = record.offset + 1
                        preference = Preference.model_validate_json(record.value)
                        if seen.get(preference.preference_id, 0) < preference.revision:  # a repeated delivery
                            seen[preference.preference_id] = preference.revision
                            if len(seen) > _REMEMBERED:
                                seen.popitem(last=False)
                            yield _row(preference) | {"position": _write_position(log.log_id, offsets)}
        finally:
            consumer.close(autocommit=False)
    finally:
        logs.close()


def _row(preference: Preference) -> dict[str, Any]:
    """Every row has the same columns of the same types, as datasets want it."""
    prompt = [
        {"role": str(message.get("role")), "content": plain_text(message.get("content"))}
        for message in preference.prompt or ()
    ]
    sides = {
        name: [] if text is None else [{"role": "assistant", "content": text}]
        for name, text in (("chosen", preference.chosen), ("rejected", preference.rejected))
    }
    told = preference.model_dump(mode="json", include=_TOLD)
    return {"prompt": prompt, **sides, **told}


_TOLD = {
    "preference_id",
    "revision",
    "retracted",
    "tie",
    "kind",
    "prompt_hash",
    "rater",
    "source",
    "chosen_response_id",
    "rejected_response_id",
}


def plain_text(content: Any) -> str:
    """A message's text: OpenAI allows a string, null, or a list of parts, of which the text ones count."""
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(text for text in texts if isinstance(text, str))
    return "" if content is None else str(content)


def _write_position(log_id: str, offsets: dict[int, int]) -> str:
    return json.dumps({"log": log_id, "offsets": {str(number): offset for number, offset in offsets.items()}})


def _read_position(position: str | None, log_id: str) -> dict[int, int]:
    if position is None:
        return {}
    try:
        told = json.loads(position)
        offsets = {int(number): int(offset) for number, offset in told["offsets"].items()}
        known = told["log"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a position of a preference stream: {position!r}") from error
    if known != log_id:
        raise LogChanged("the position belongs to a log that is gone; start again without one")
    return offsets
