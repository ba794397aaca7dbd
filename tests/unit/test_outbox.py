"""Laws of the outbox: what is acknowledged stays, a retry is harmless, another content is refused."""

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path

import pytest

from feedback.errors import OutboxConflict, OutboxFull, OutboxUnavailable
from feedback.outbox import Outbox
from feedback.outbox_file import DAMAGED_SUFFIX, OutboxFile, Sent, list_files, open_files
from tests.helpers.events_built import build_interaction, build_thumb, build_vote

ROOT = Path(__file__).parents[2]


def pending_ids(directory: Path) -> list[str]:
    """The event ids that wait for the log, over all files."""
    ids = []
    for path in list_files(directory):
        file = OutboxFile(path, durable=False)
        ids += [row.event_id for row in file.pending(10_000)]
        file.close()
    return ids


def a_retried_vote_is_a_duplicate_and_waits_once(tmp_path: Path) -> None:
    box = Outbox.open(tmp_path)
    vote = build_thumb()
    assert box.append([vote]).result(5) == ["accepted"]
    assert box.append([vote, vote]).result(5) == ["duplicate", "duplicate"]
    box.close()
    assert pending_ids(tmp_path) == [vote.event_id]
    assert +box.counters == {"accepted": 1, "duplicate": 2}


def a_retry_that_is_stamped_anew_is_still_the_same_vote(tmp_path: Path) -> None:
    box = Outbox.open(tmp_path)
    vote = build_thumb()
    later = vote.model_copy(update={"time": datetime(2030, 1, 1, tzinfo=UTC)})
    assert box.append([vote]).result(5) == ["accepted"]
    assert box.append([later]).result(5) == ["duplicate"]
    box.close()


def an_event_id_with_other_content_is_refused_and_nothing_of_the_call_is_written(tmp_path: Path) -> None:
    box = Outbox.open(tmp_path)
    vote, bystander = build_thumb(value="up"), build_thumb()
    other = vote.model_copy(update={"value": "down"})
    box.append([vote]).result(5)
    with pytest.raises(OutboxConflict) as refusal:
        box.append([bystander, other]).result(5)
    assert refusal.value.event_id == vote.event_id
    with pytest.raises(OutboxConflict):
        box.append([bystander, bystander.model_copy(update={"value": "down"})]).result(5)
    assert box.append([bystander]).result(5) == ["accepted"]
    box.close()
    assert box.counters["conflict"] == 4
    assert pending_ids(tmp_path) == [vote.event_id, bystander.event_id]


def a_conflict_harms_no_other_call_in_the_same_commit(tmp_path: Path) -> None:
    box = Outbox.open(tmp_path)
    votes = [build_thumb() for _ in range(50)]
    bad = votes[0].model_copy(update={"value": "down"})
    answers = [box.append([vote]) for vote in votes] + [box.append([bad])]
    assert [answer.result(5) for answer in answers[:50]] == [["accepted"]] * 50
    assert isinstance(answers[50].exception(5), OutboxConflict)
    box.close()


def every_thread_gets_its_own_answer(tmp_path: Path) -> None:
    box = Outbox.open(tmp_path)
    mine = [[build_thumb() for _ in range(20)] for _ in range(8)]
    answers: list[Future[list[str]]] = []

    def send(votes: list) -> None:
        for vote in votes:
            answers.append(box.append([vote]))

    threads = [threading.Thread(target=send, args=(votes,)) for votes in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.result(5) for answer in answers] == [["accepted"]] * 160
    box.close()
    assert sorted(pending_ids(tmp_path)) == sorted(vote.event_id for votes in mine for vote in votes)


def a_file_whose_owner_is_gone_is_adopted(tmp_path: Path) -> None:
    first = Outbox.open(tmp_path)
    first.append([build_thumb()]).result(5)
    second = Outbox.open(tmp_path)  # the first is alive: a file of its own
    assert second.path != first.path
    first.close()
    third = Outbox.open(tmp_path)
    assert third.path == first.path
    second.close()
    third.close()
    assert len(list_files(tmp_path)) == 2


def an_outbox_that_is_full_says_so_counts_it_and_takes_events_again_later(tmp_path: Path) -> None:
    box = Outbox.open(tmp_path, max_pending=3)
    box.append([build_thumb() for _ in range(3)]).result(5)
    with pytest.raises(OutboxFull):
        box.append([build_thumb()])
    assert box.counters["refused_full"] == 1
    with sqlite3.connect(box.path) as relay:  # everything waits no longer
        relay.execute("update events set sent_at = 1.0")
    deadline = time.monotonic() + 10
    while True:
        try:
            box.append([build_thumb()]).result(5)
            break
        except OutboxFull:
            assert time.monotonic() < deadline, "it stays full for ever"
            time.sleep(0.1)
    box.close()
    with pytest.raises(OutboxFull):
        Outbox.open(tmp_path / "other", max_queued=2).append([build_thumb() for _ in range(3)])


def only_the_owner_can_read_an_outbox(tmp_path: Path) -> None:
    box = Outbox.open(tmp_path / "outbox")
    box.append([build_thumb()]).result(5)
    for path in (tmp_path / "outbox", *(tmp_path / "outbox").iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path
    box.close()


def a_closed_outbox_acknowledges_nothing(tmp_path: Path) -> None:
    box = Outbox.open(tmp_path)
    box.close()
    box.close()
    with pytest.raises(OutboxUnavailable):
        box.append([build_thumb()])


def a_file_that_cannot_be_written_fails_the_call_and_is_counted(tmp_path: Path) -> None:
    box = Outbox.open(tmp_path)
    with sqlite3.connect(box.path) as breaker:
        breaker.execute("drop table events")
    with pytest.raises(OutboxUnavailable):
        box.append([build_thumb()]).result(5)
    box.close()
    assert box.counters["failed"] == 1


def a_sent_row_waits_again_when_the_log_is_another_one(tmp_path: Path) -> None:
    box = Outbox.open(tmp_path)
    vote, answer = build_thumb(), build_interaction()
    box.append([vote, answer]).result(5)
    file = OutboxFile(box.path, durable=False)
    rows = file.pending(10)
    file.mark_sent([Sent(row.seq, "log-1", 0, row.seq) for row in rows])
    assert file.pending(10) == []
    assert file.redrive(rows[0].topic, "log-1") == 0
    assert file.redrive(rows[0].topic, "log-2") == 1
    assert [row.event_id for row in file.pending(10)] == [vote.event_id]
    file.close()
    box.close()


def a_dead_row_is_kept_for_ever_and_a_sent_one_for_the_retention_window(tmp_path: Path) -> None:
    box = Outbox.open(tmp_path)
    votes = [build_thumb() for _ in range(3)]
    box.append(votes).result(5)
    file = OutboxFile(box.path, durable=False)
    sent, dead, _ = file.pending(10)
    file.mark_sent([Sent(sent.seq, "log-1", 0, 0)])
    file.mark_dead(dead.seq, "too large")
    assert file.prune(sent_before=0, limit=10) == 0
    assert file.prune(sent_before=2**40, limit=10) == 1
    assert [standing.event_id for standing in file.standings()] == [vote.event_id for vote in votes[1:]]
    file.close()
    box.close()


_WRITER = """
import sys
from pathlib import Path
from feedback.outbox import Outbox
from tests.helpers.events_built import build_thumb

box = Outbox.open(Path(sys.argv[1]))
while True:
    vote = build_thumb()
    box.append([vote]).result(10)
    print(vote.event_id, flush=True)
"""


def what_was_acknowledged_survives_the_death_of_its_process(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    acknowledged = [writer.stdout.readline().strip() for _ in range(200)]
    writer.send_signal(signal.SIGKILL)
    acknowledged += [line.strip() for line in writer.stdout if line.endswith("\n")]
    writer.wait(10)
    heir = Outbox.open(tmp_path)
    assert len(list_files(tmp_path)) == 1
    assert set(acknowledged) <= set(pending_ids(tmp_path))
    heir.close()


def _flip(path: Path, content: bytes) -> None:
    """Change one byte in the middle of `content` where it lies in the file."""
    raw = bytearray(path.read_bytes())
    assert raw.count(content) == 1
    raw[raw.index(content) + len(content) // 2] ^= 0xFF
    path.write_bytes(raw)


@pytest.mark.parametrize("content", [b"some words of anna", b"flywheel.feedback.comment.v1"])
def a_byte_that_the_disk_changed_is_seen_and_harms_no_other_row(tmp_path: Path, content: bytes) -> None:
    box = Outbox.open(tmp_path)
    box.append([build_vote("comment", text="some words of anna"), build_thumb()]).result(10)
    box.close()
    [path] = list_files(tmp_path)
    _flip(path, content)
    file = OutboxFile(path, durable=False)
    assert [row.intact for row in file.pending(10)] == [False, True]
    file.close()


def a_damaged_file_is_set_aside_by_its_owner_and_by_who_would_adopt_it(tmp_path: Path) -> None:
    box = Outbox.open(tmp_path)
    box.append([build_thumb() for _ in range(300)]).result(10)
    [path] = list_files(tmp_path)
    box.close()  # all of it is in the file itself now
    raw = path.read_bytes()
    path.write_bytes(raw[:4096] + bytes(len(raw) - 4096))
    assert list(open_files(tmp_path)) == []
    box = Outbox.open(tmp_path)
    assert box.append([build_thumb()]).result(10) == ["accepted"]
    box.close()
    assert path.with_name(path.name + DAMAGED_SUFFIX).exists()

    box = Outbox.open(tmp_path)
    box.append([build_thumb() for _ in range(5_000)]).result(10)
    checkpoint = sqlite3.connect(box.path)
    checkpoint.execute("pragma wal_checkpoint(truncate)")
    checkpoint.close()
    with box.path.open("r+b") as raw_file:  # under its owner; what that still has in memory stays right for a while
        raw_file.seek(4096)
        raw_file.write(bytes(box.path.stat().st_size - 4096))
    failed = next(error for _ in range(100) if (error := box.append([build_thumb() for _ in range(100)]).exception(10)))
    assert isinstance(failed, OutboxUnavailable)
    assert box.append([build_thumb()]).result(10) == ["accepted"]
    assert box.counters["damaged_files"] == 1
    box.close()


def a_file_of_an_older_version_is_read_and_erased_like_any_other(tmp_path: Path) -> None:
    box = Outbox.open(tmp_path)
    box.append([vote := build_thumb()]).result(10)
    box.close()
    old = sqlite3.connect(box.path)
    old.execute("drop index pending")
    old.execute("alter table events drop column erased_at")
    old.execute("alter table events drop column checksum")
    old.execute("create index pending on events (seq) where sent_at is null and dead_at is null")
    old.close()
    assert pending_ids(tmp_path) == [vote.event_id]
    for file in open_files(tmp_path):
        assert file.erase([vote.event_id]) == 1
    assert pending_ids(tmp_path) == []
