"""Sends records one batch at a time and waits for every acknowledgement; what is too large stops no other."""

from collections.abc import Sequence
from typing import Any

from kafka.errors import MessageSizeTooLargeError

from feedback.records import Headers
from feedback.settings import FeedbackSettings
from feedback.topics import close_producer, make_producer, reaching_the_log

AnyRecord = tuple[str, bytes | None, bytes | None, Headers]
"""Topic, key, value, headers."""


class Sender:
    """Holds one producer, made when it is needed. Any error leaves it usable; one thread."""

    def __init__(self, settings: FeedbackSettings) -> None:
        self._settings = settings
        self._producer: Any = None

    def send(self, records: Sequence[AnyRecord]) -> list[int]:
        """Send them; returns the numbers of those that are too large for the log, which it does not have.

        Raises LogUnreachable: then some may have been sent.
        """
        large = [number for number, record in enumerate(records) if size_of(record) > self._settings.max_record_bytes]
        small = [number for number in range(len(records)) if number not in set(large)]
        if not self._take([records[number] for number in small]):  # the broker's own limit is lower: which?
            large += [number for number in small if not self._take([records[number]])]
        return sorted(large)

    def _take(self, records: Sequence[AnyRecord]) -> bool:
        """False when one of them is too large; then some may not have been sent."""
        if not records:
            return True
        with reaching_the_log():
            if self._producer is None:
                self._producer = make_producer(self._settings)
            try:
                futures = [
                    self._producer.send(topic, key=key, value=value, headers=headers)
                    for topic, key, value, headers in records
                ]
                for future in futures:
                    future.get(timeout=self._settings.delivery_timeout_s)
            except MessageSizeTooLargeError:  # after one such answer an idempotent producer fails for ever
                self.close()
                return False
        return True

    def close(self) -> None:
        """Drop the producer; the next `send` makes another."""
        if self._producer is not None:
            close_producer(self._producer)
            self._producer = None


def size_of(record: AnyRecord) -> int:
    """Bytes of key, value and headers."""
    _, key, value, headers = record
    return len(key or b"") + len(value or b"") + sum(len(name.encode()) + len(told or b"") for name, told in headers)
