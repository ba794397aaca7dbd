"""Dead letters: records that can't be read, stored or sent, kept with everything they were.

A dead letter travels on `<topic>.dlq` with its original key, value and headers, and with the headers that
Kafka Connect gives its own (`__connect.errors.*`, KIP-298), so that known tools can read them.
"""

from collections.abc import Sequence

from feedback.topics import DEAD_LETTER_SUFFIX

DeadLetterRecord = tuple[str, bytes | None, bytes | None, list[tuple[str, bytes]]]


def dead_letter_record(
    *,
    topic: str,
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes]],
    place: tuple[int, int] | None,
    stage: str,
    error_class: str,
    error_message: str,
) -> DeadLetterRecord:
    """(topic, key, value, headers) of the dead letter. place: partition and offset, where it had one.

    stage: the process that gave up, `relay` or `ingest`.
    """
    told = {
        "topic": topic,
        "partition": "" if place is None else str(place[0]),
        "offset": "" if place is None else str(place[1]),
        "connector.name": "flywheel",
        "task.id": "0",
        "stage": stage,
        "class.name": "",
        "exception.class.name": error_class,
        "exception.message": error_message[:2_000],
        "exception.stacktrace": "",
    }
    errors = [(f"__connect.errors.{name}", text.encode(errors="replace")) for name, text in told.items() if text]
    kept = [(name, content or b"") for name, content in headers]  # Kafka allows a null, its client does not send one
    return topic + DEAD_LETTER_SUFFIX, key, value if value is not None else b"", [*kept, *errors]
