"""Settings of the storage room."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class StorageSettings(BaseModel):
    """Where the database and the artifacts are.

    dsn: libpq connection string; empty means the embedded PostgreSQL under the home folder.
    artifacts: root folder of snapshots, reward models and checkpoints.
    connect_timeout_s: seconds to wait for a connection.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dsn: str = ""
    artifacts: Path = Path(".flywheel/artifacts")
    connect_timeout_s: int = 10
