"""Laws of storage: migrations go forward only, artifacts are whole or not there."""

from pathlib import Path

import pytest

from storage.artifacts import MARKER, read_manifest, write_artifact
from storage.errors import ArtifactIncomplete, DatabaseNewer, DatabaseUnreachable, MigrationChanged
from storage.migrations import Migration, migrate, read_migrations
from storage.postgres import connect
from tests.helpers.servers import ROOMS, ROOT

FIRST = Migration("room/0001_one", "create table one (a integer); insert into one values (1)")
SECOND = Migration("room/0002_two", "create table two (b integer)")


@pytest.fixture
def empty(dsn: str) -> str:
    """A database without any migration."""
    with connect(dsn) as connection:
        connection.execute("drop schema public cascade; create schema public")
    return dsn


@pytest.mark.real
def a_migration_is_applied_once_and_in_order(empty: str) -> None:
    assert migrate(empty, [FIRST]) == ["room/0001_one"]
    assert migrate(empty, [FIRST, SECOND]) == ["room/0002_two"]
    assert migrate(empty, [FIRST, SECOND]) == []


@pytest.mark.real
def a_migration_that_fails_leaves_nothing_behind(empty: str) -> None:
    bad = Migration("room/0002_bad", "create table half (a integer); select 1 / 0")
    with pytest.raises(Exception, match="division by zero"):
        migrate(empty, [FIRST, bad])
    with connect(empty) as connection:
        found = connection.execute("select to_regclass('half') as half, to_regclass('one') as one").fetchone()
    assert found == {"half": None, "one": None}


@pytest.mark.real
def an_edited_or_unknown_migration_is_refused(empty: str) -> None:
    migrate(empty, [FIRST, SECOND])
    with pytest.raises(MigrationChanged):
        migrate(empty, [Migration(FIRST.name, FIRST.sql + " "), SECOND])
    with pytest.raises(DatabaseNewer):
        migrate(empty, [FIRST])


@pytest.mark.real
def the_migrations_of_all_rooms_are_applied_to_a_fresh_database(dsn: str) -> None:
    migrations = read_migrations([ROOT / room / "migrations" for room in ROOMS])
    assert {migration.name.split("/")[0] for migration in migrations} == set(ROOMS)
    assert migrate(dsn, migrations) == []


def a_server_that_is_not_there_is_told_in_time() -> None:
    with pytest.raises(DatabaseUnreachable):
        connect("host=127.0.0.1 port=1 user=nobody dbname=none", connect_timeout_s=2)


def an_artifact_without_its_marker_is_not_read(tmp_path: Path) -> None:
    target = write_artifact(tmp_path / "one", lambda folder: {"name": "one"})
    assert read_manifest(target) == {"name": "one"}
    (target / MARKER).unlink()
    with pytest.raises(ArtifactIncomplete):
        read_manifest(target)


def a_second_write_under_one_name_keeps_the_first(tmp_path: Path) -> None:
    write_artifact(tmp_path / "one", lambda folder: {"version": 1})
    write_artifact(tmp_path / "one", lambda folder: {"version": 2})
    assert read_manifest(tmp_path / "one") == {"version": 1}


def a_writer_that_fails_leaves_nothing_and_can_try_again(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict[str, str]:
        (folder / "half").write_text("x")
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError):
        write_artifact(tmp_path / "one", fail)
    assert list(tmp_path.iterdir()) == []
    write_artifact(tmp_path / "one", lambda folder: {"version": 2})
    assert read_manifest(tmp_path / "one") == {"version": 2}
