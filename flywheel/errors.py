"""Errors of the front door.

FlywheelError             carries the exit code of the command that it ends
├── SettingsInvalid       a setting is unknown or has a bad value (exit 2; no retry)
├── AlreadyRunning        another supervisor holds this home (exit 3; stop it first)
├── StartFailed           a component or a set-up step did not come up; nothing is left running (exit 1)
├── NotRunning            the command needs a running platform (exit 1; `flywheel up` first)
├── PortTaken             somebody else listens on a port that we need (exit 1; change the port or free it)
├── PartMissing           an installed package or one of its files is not there (exit 1; run `make setup`)
├── DemoFailed            the demo's turn of the wheel did not come to an end (exit 1; see the logs)
├── BenchFailed           a server of a bench did not serve, or an answer was broken (exit 1; its log is shown)
└── StopTimedOut          processes survived the drain and the kill (exit 1; a retry can help)
"""


class FlywheelError(Exception):
    """Base of the room. The message is one line that says what to do."""

    exit_code = 1


class SettingsInvalid(FlywheelError):
    """An unknown key or a bad value in the settings tree."""

    exit_code = 2


class AlreadyRunning(FlywheelError):
    """This home has a supervisor already."""

    exit_code = 3


class StartFailed(FlywheelError):
    """The platform did not come up and was taken down again."""


class NotRunning(FlywheelError):
    """No supervisor runs for this home."""


class PortTaken(FlywheelError):
    """A port that a component needs is in use."""


class PartMissing(FlywheelError):
    """A file or a package that the installation should hold is missing."""


class BenchFailed(FlywheelError):
    """A bench could not measure what it was asked to."""


class StopTimedOut(FlywheelError):
    """Something is still running after the drain, the kill and the sweep."""


class DemoFailed(FlywheelError):
    """The turn did not end, or a promise of the demo was not kept."""
