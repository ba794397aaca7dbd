"""Settings of the storage room."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class StorageSettings(BaseModel):
    """Where the database and the artifacts are.

    dsn: libpq connection string; empty means the embedded PostgreSQL under the home folder. Its own
        `connect_timeout` (seconds) replaces the ten seconds that a connection may take.
    artifacts: root folder of snapshots, reward models and checkpoints.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dsn: str = ""
    artifacts: Path = Path(".flywheel/artifacts")
