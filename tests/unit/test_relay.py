"""Laws of the relay, on the in-memory twin of the log: what fails there is hard to bring about on a real broker."""

import threading
import time
from pathlib import Path

import pytest

from feedback import relay as relay_module
from feedback.errors import LogError
from feedback.events import AnyEvent
from feedback.outbox import Outbox
from feedback.outbox_file import Accepted, OutboxFile, create_file, list_files, set_aside
from feedback.records import from_record, to_record
from feedback.relay import Relay
from feedback.settings import FeedbackSettings
from tests.helpers.events_built import build_interaction, build_thumb
from tests.helpers.ledger import accept, ledger_settings
from tests.helpers.memory_log import MemoryLog


def make_relay(outbox: Path, log: MemoryLog) -> Relay:
    """A relay of that folder on that log."""
    return Relay(ledger_settings(outbox, "nowhere:1"), log.connect_logs, log.connect_producer)


def drain(relay: Relay, steps: int = 20) -> None:
    """Step as `run` does: start over after an error."""
    for _ in range(steps):
        try:
            relay.step()
        except LogError:
            relay.disconnect()


def pending(outbox: Path) -> list[str]:
    (path,) = list_files(outbox)
    file = OutboxFile(path, durable=False)
    ids = [row.event_id for row in file.pending(1000)]
    file.close()
    return ids


def published(log: MemoryLog) -> list[str]:
    """The ids of the events in the log, dead letters not among them."""
    return [from_record(topic, value).event_id for topic, value in log.records if not topic.endswith(".dlq")]


def a_producer_that_hangs_costs_one_time_out_and_not_one_for_each_record(tmp_path: Path) -> None:
    votes: list[AnyEvent] = [build_thumb() for _ in range(50)]
    accept(tmp_path, votes)
    log = MemoryLog(hung=True)
    settings = ledger_settings(tmp_path, "nowhere:1", delivery_timeout_s=0.2, request_timeout_s=0.1)
    relay = Relay(settings, log.connect_logs, log.connect_producer)
    with pytest.raises(LogError):
        relay.step()
    assert log.waited_s <= 0.3
    log.hung = False
    drain(relay)
    relay.close()
    assert sorted(published(log)) == sorted(vote.event_id for vote in votes)


def a_row_is_sent_only_if_its_own_record_was_acknowledged(tmp_path: Path) -> None:
    votes: list[AnyEvent] = [build_thumb() for _ in range(10)]
    accept(tmp_path, votes)
    log = MemoryLog(lose=3)
    relay = make_relay(tmp_path, log)
    with pytest.raises(LogError):
        relay.step()
    assert pending(tmp_path) == [vote.event_id for vote in votes[:3]]
    relay.disconnect()
    drain(relay)
    relay.close()
    assert pending(tmp_path) == []
    assert sorted(published(log)) == sorted(vote.event_id for vote in votes)
    assert (relay.counters["sent"], relay.counters["failed"], log.producers) == (10, 3, 2)


def a_record_that_the_broker_calls_too_large_is_found_and_buried_and_the_others_go(tmp_path: Path) -> None:
    large = build_interaction(text="x" * 2_000)
    votes: list[AnyEvent] = [build_thumb() for _ in range(6)]
    accept(tmp_path, [*votes[:3], large, *votes[3:]])
    log = MemoryLog(largest=2_000)
    settings = ledger_settings(tmp_path, "nowhere:1", max_record_bytes=4_000)
    relay = Relay(settings, log.connect_logs, log.connect_producer)
    drain(relay)
    relay.close()
    assert pending(tmp_path) == []
    assert set(published(log)) == {vote.event_id for vote in votes}
    assert [topic for topic, _ in log.records if topic.endswith(".dlq")] == ["flywheel.interactions.v1.dlq"]
    assert relay.counters["dead_lettered"] == 1
    assert log.producers > 1  # the first one had turned useless


def no_row_is_sent_if_the_log_changed_meanwhile(tmp_path: Path) -> None:
    votes: list[AnyEvent] = [build_thumb() for _ in range(10)]
    accept(tmp_path, votes)
    log = MemoryLog(change_after=5)
    relay = make_relay(tmp_path, log)
    with pytest.raises(LogError):
        relay.step()
    assert len(pending(tmp_path)) == 10
    drain(relay)
    relay.close()
    assert set(published(log)) == {vote.event_id for vote in votes}


def what_went_to_a_log_that_is_gone_is_sent_again_once(tmp_path: Path) -> None:
    votes: list[AnyEvent] = [build_thumb() for _ in range(10)]
    accept(tmp_path, votes)
    log = MemoryLog()
    relay = make_relay(tmp_path, log)
    drain(relay)
    log.identity, log.records = 2, []
    time.sleep(0.35)  # log_check_s of the test's settings
    drain(relay)
    relay.close()
    assert published(log) == [vote.event_id for vote in votes]
    assert relay.counters["redriven"] == 10


def a_second_relay_waits_until_the_first_is_gone(tmp_path: Path) -> None:
    settings = FeedbackSettings(outbox=tmp_path)
    stop_first, stop_second = threading.Event(), threading.Event()
    with relay_module._only_one(settings.outbox, stop_first):
        entered = threading.Event()

        def second() -> None:
            with relay_module._only_one(settings.outbox, stop_second):
                entered.set()

        waiting = threading.Thread(target=second)
        waiting.start()
        assert not entered.wait(0.5)
    assert entered.wait(5)
    waiting.join(5)


@pytest.mark.parametrize("whole_bytes", [0, 4096])
def a_damaged_file_holds_up_no_other_and_one_that_takes_its_place_is_read(tmp_path: Path, whole_bytes: int) -> None:
    lost, kept, later = build_thumb(), build_thumb(), build_thumb()
    accept(tmp_path, [lost])
    [damaged] = list_files(tmp_path)
    holder = Outbox.open(tmp_path)  # so that the next one makes a second file
    accept(tmp_path, [kept])
    holder.close()
    damaged.write_bytes(damaged.read_bytes()[:whole_bytes] + b"\xff" * 30_000)
    log = MemoryLog()
    relay = make_relay(tmp_path, log)
    drain(relay)
    assert published(log) == [kept.event_id]
    set_aside(damaged)
    create_file(damaged)
    file = OutboxFile(damaged, durable=True)
    topic, key, value, headers = to_record(later)
    file.insert([[Accepted(later.event_id, b"", topic, key, value, headers)]])
    file.close()
    drain(relay)
    relay.close()
    assert published(log) == [kept.event_id, later.event_id]
