"""Records that the platform itself says on the topics, written with what makes them true.

Guarantee: a record is published, at least once to each log there is, if and only if the caller's transaction commits.
The ingest publishes them, in their order (feedback.publishing).
"""

import base64
import json
from collections.abc import Sequence

from feedback.events import Told
from feedback.records import Headers, to_record
from storage.postgres import Connection

OutgoingRecord = tuple[str, str, str | None, Headers]
"""Topic, key, value (None: a tombstone), headers."""


def announce(connection: Connection, event: Told) -> None:
    """Say an event, if the transaction commits."""
    topic, key, value, headers = to_record(event)
    write_records(connection, [(topic, key.decode(), value.decode(), headers)])


def write_records(connection: Connection, records: Sequence[OutgoingRecord]) -> None:
    """Say these records, if the transaction commits."""
    with connection.cursor() as cursor:
        cursor.executemany(
            "insert into outgoing_records (topic, key, value, headers) values (%s, %s, %s, %s)",
            [(topic, key, value, headers_to_json(headers)) for topic, key, value, headers in records],
        )


def headers_to_json(headers: Sequence[tuple[str, bytes]]) -> str:
    """Headers as the tables keep them. PostgreSQL's text can't hold U+0000: it becomes U+FFFD."""
    encoded = [(name.replace("\0", "\ufffd"), base64.b64encode(value or b"").decode()) for name, value in headers]
    return json.dumps(encoded)


def headers_from_json(headers: Sequence[Sequence[str]]) -> Headers:
    """Headers as they travel."""
    return [(name, base64.b64decode(value)) for name, value in headers]
