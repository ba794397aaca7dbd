"""Errors of the storage room.

StorageError
├── DatabaseNewer      the database was migrated by newer code; upgrade the code (no retry)
├── MigrationChanged   an applied migration file was edited (no retry)
├── DatabaseUnreachable  no connection within the time-out (a retry can help)
└── ArtifactIncomplete   a directory without its marker was asked for (no retry)
"""


class StorageError(Exception):
    """Base of the room."""


class DatabaseNewer(StorageError):
    """The database carries a migration that this code does not know."""


class MigrationChanged(StorageError):
    """A migration that has been applied no longer has the content it had then."""


class DatabaseUnreachable(StorageError):
    """PostgreSQL did not accept a connection in time."""


class ArtifactIncomplete(StorageError):
    """An artifact directory has no marker: its writer did not finish."""
