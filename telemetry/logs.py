"""Log set-up: one line a record, on standard error."""

import logging

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up_logs(level: int = logging.INFO) -> None:
    """Send this process's log records of `level` and above to standard error; harmless when called twice."""
    root = logging.getLogger()
    root.setLevel(level)
    if not any(getattr(handler, "flywheel", False) for handler in root.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        handler.flywheel = True  # type: ignore[attr-defined]
        root.addHandler(handler)
