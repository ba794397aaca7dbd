"""Set-up steps of a start: the database with its migrations, and the first API key."""

import os
from pathlib import Path

from flywheel.embedded import create_database
from flywheel.settings import Settings
from serving.errors import ServingError
from serving.keys import SCOPES, check, create_key, load_keys
from storage.migrations import migrate, read_migrations
from storage.postgres import connect

_ROOMS = ("serving", "feedback", "reward", "rounds")


def migration_directories() -> list[Path]:
    """Every room's migrations, in the order in which they are applied."""
    root = Path(__file__).parent.parent
    return [root / room / "migrations" for room in _ROOMS]


def migrate_database(settings: Settings) -> list[str]:
    """Make the embedded database if it is missing, apply what is not applied; returns the names applied now.

    Raises storage.errors.DatabaseUnreachable, DatabaseNewer, MigrationChanged.
    """
    if settings.embedded_postgres:
        create_database(settings.home)
    return migrate(settings.storage.dsn, read_migrations(migration_directories()))


def ensure_first_key(settings: Settings) -> str:
    """Write a key with all scopes to `<home>/api-key`, mode 0600, unless the one there is live. Returns what it did.

    The row is committed before the file is written: a kill in between leaves a key that nobody knows.
    """
    target = settings.api_key_file
    with connect(settings.storage.dsn) as connection:
        if target.exists():
            try:
                check(load_keys(connection), target.read_text(encoding="utf-8").strip(), "admin")
                return f"kept the key in {target}"
            except ServingError:
                pass  # made for a database that is gone
        _, secret = create_key(connection, "first", SCOPES)
    temporary = target.with_name(f".api-key.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(secret + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(target)
    return f"wrote a key to {target}"
