"""A TCP proxy before PostgreSQL that cuts connections at COMMIT."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from psycopg.conninfo import conninfo_to_dict, make_conninfo

_COMMIT = b"COMMIT"


class CommitCutter:
    """Cuts the connection at each `every`-th COMMIT, `times` times: in turn before and after the server hears it."""

    def __init__(self, socket_path: str, every: int, times: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._path = socket_path
        self._every = every
        self.left = times
        self._seen = 0
        self._guard = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._path)
                silent = threading.Event()
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(
                        target=self._carry, args=(source, sink, source is client, silent), daemon=True
                    ).start()

    def _carry(self, source: socket.socket, sink: socket.socket, is_client: bool, silent: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                cut = is_client and _COMMIT in data and self._cuts()
                if cut == "after":
                    silent.set()  # the answer is not carried back
                if cut != "before" and not (silent.is_set() and not is_client):
                    sink.sendall(data)
                if cut == "before" or (silent.is_set() and not is_client):
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _cuts(self) -> str:
        with self._guard:
            self._seen += 1
            if self._seen % self._every or not self.left:
                return ""
            self.left -= 1
            return "before" if self.left % 2 else "after"


@contextmanager
def cutting_commits(dsn: str, *, every: int, times: int) -> Iterator[tuple[str, CommitCutter]]:
    """A DSN that leads through a proxy to the PostgreSQL that `dsn` names by a folder of sockets."""
    told = conninfo_to_dict(dsn)
    cutter = CommitCutter(f"{told['host']}/.s.PGSQL.{told.get('port', 5432)}", every, times)
    try:
        yield make_conninfo(dsn, host="127.0.0.1", port=cutter.port), cutter
    finally:
        cutter.close()
