"""Ordered migrations: each room keeps numbered .sql files, applied once, in order, in one transaction each.

Guarantees: two processes that migrate at once do it one after the other (advisory lock); an edited or
unknown applied migration is refused. There are no down-migrations: evolution is additive.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from storage.errors import DatabaseNewer, MigrationChanged
from storage.postgres import Connection, connect

_LOCK_KEY = 0x666C7977
_TABLE = """
create table if not exists schema_migrations (
    name text primary key,
    sha256 text not null,
    applied_at timestamptz not null default now()
)
"""


@dataclass(frozen=True)
class Migration:
    """One file: name is `<room>/<number>_<topic>`, sql its content."""

    name: str
    sql: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def read_migrations(directories: Sequence[Path]) -> list[Migration]:
    """Read `<room>/migrations/*.sql` of each directory, rooms in the order given, files by name."""
    return [
        Migration(f"{directory.parent.name}/{file.stem}", file.read_text(encoding="utf-8"))
        for directory in directories
        for file in sorted(directory.glob("*.sql"))
    ]


def migrate(dsn: str, migrations: Sequence[Migration]) -> list[str]:
    """Bring the database up to `migrations` and return the names applied now.

    Raises DatabaseNewer when the database has one that is not in the list, MigrationChanged when one
    that was applied has other content today.
    """
    known = {migration.name: migration for migration in migrations}
    with connect(dsn) as connection:
        connection.execute("select pg_advisory_xact_lock(%s)", (_LOCK_KEY,))
        connection.execute(_TABLE)
        applied = _applied(connection)
        unknown = sorted(set(applied) - set(known))
        if unknown:
            raise DatabaseNewer(
                f"the database has migrations that this version does not know: {', '.join(unknown)}; "
                "install the newer version, or point storage.dsn at another database"
            )
        for name, sha256 in applied.items():
            if known[name].sha256 != sha256:
                raise MigrationChanged(f"migration {name} was edited after it was applied; add a new file instead")
        fresh = [migration for migration in migrations if migration.name not in applied]
        for migration in fresh:
            connection.execute(migration.sql)
            connection.execute(
                "insert into schema_migrations (name, sha256) values (%s, %s)",
                (migration.name, migration.sha256),
            )
    return [migration.name for migration in fresh]


def _applied(connection: Connection) -> dict[str, str]:
    rows = connection.execute("select name, sha256 from schema_migrations").fetchall()
    return {row["name"]: row["sha256"] for row in rows}
