"""The settings tree: the rooms' settings composed, read once at the edge.

Precedence: defaults < `flywheel.toml` (in the working directory, or the file that FLYWHEEL_CONFIG names)
< environment (`FLYWHEEL_SERVING__PORT=8001`) < command line (`flywheel --set serving.port=8001 …`).
An unknown key is an error that names it, in each of the three.
`load_settings` resolves: paths that were not set derive from `home`, all paths become absolute, and an empty
`storage.dsn` becomes the embedded server's. Inner code gets values and never looks at the environment.
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from feedback.settings import FeedbackSettings
from flywheel.embedded import embedded_dsn
from flywheel.errors import SettingsInvalid
from flywheel.processes import TAG
from reward.settings import RewardSettings
from rounds.settings import RoundsSettings
from serving.settings import ServingSettings
from storage.settings import StorageSettings

PREFIX = "FLYWHEEL_"
CONFIG_VARIABLE = "FLYWHEEL_CONFIG"
CONFIG_FILE = "flywheel.toml"
BASE_MODEL = "smollm2-135m-instruct"
_SECRET_KEY = re.compile(r"password|secret|token$|credential", re.IGNORECASE)
_DSN_PASSWORD = re.compile(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'|\S+)|(://[^:/@\s]*:)([^@\s]+)(?=@)")


class SupervisorSettings(BaseModel):
    """How `flywheel up` starts, watches and stops the components. All times in seconds.

    start_timeout_s: for one component or set-up step to become ready, model preparation included.
    drain_timeout_s: for votes on their way to reach the store at shutdown.
    stop_timeout_s: for one component to end after it was asked to; then it is killed.
    backoff_first_s, backoff_most_s: the wait before a component that died is started again, doubling.
    stable_after_s: a component that ran this long starts its next backoff from the first value again.
    start_attempts: how often a component may die during the start until the whole start is given up.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    start_timeout_s: float = Field(default=600, gt=0)
    drain_timeout_s: float = Field(default=30, ge=0)
    stop_timeout_s: float = Field(default=30, gt=0)
    backoff_first_s: float = Field(default=0.2, gt=0)
    backoff_most_s: float = Field(default=10, gt=0)
    stable_after_s: float = Field(default=30, gt=0)
    start_attempts: int = Field(default=3, ge=1)


class Settings(BaseSettings):
    """Everything that can be set. `home` holds all state on disk; removing it while stopped starts afresh."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=False,
    )

    home: Path = Path(".flywheel")
    storage: StorageSettings = Field(default_factory=StorageSettings)
    serving: ServingSettings = Field(default_factory=ServingSettings)
    feedback: FeedbackSettings = Field(default_factory=FeedbackSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    rounds: RoundsSettings = Field(default_factory=RoundsSettings)
    supervisor: SupervisorSettings = Field(default_factory=SupervisorSettings)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """First one wins: command line, environment, file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=_config_file())

    @property
    def logs(self) -> Path:
        """One log file for each component, and the supervisor's own."""
        return self.home / "logs"

    @property
    def run(self) -> Path:
        """The lock and the state of a running platform."""
        return self.home / "run"

    @property
    def api_key_file(self) -> Path:
        """Holds the first API key, readable by the owner only."""
        return self.home / "api-key"

    @property
    def embedded_postgres(self) -> bool:
        """Whether we run PostgreSQL ourselves: the connection string is the embedded server's."""
        return self.storage.dsn == embedded_dsn(self.home)

    @property
    def url(self) -> str:
        """Where the API is, seen from this machine."""
        host = "127.0.0.1" if self.serving.host in ("0.0.0.0", "::") else self.serving.host
        return f"http://{host}:{self.serving.port}"


def load_settings(**overrides: Any) -> Settings:
    """Read and resolve the settings. overrides: what the command line says, nested dicts allowed.

    Raises SettingsInvalid with one line for each bad or unknown key.
    """
    _refuse_unknown_variables(os.environ)
    try:
        settings = Settings(**overrides)
    except ValidationError as error:
        raise SettingsInvalid(_explain(error)) from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsInvalid(f"{_config_file()} is not valid TOML: {error}") from error
    return _resolve(settings)


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Turn `["serving.port=8001"]` into `{"serving": {"port": "8001"}}`. Raises SettingsInvalid."""
    tree: dict[str, Any] = {}
    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        *path, leaf = key.strip().split(".")
        if not separator or not leaf:
            raise SettingsInvalid(f"--set {assignment}: write it as room.key=value, such as serving.port=8001")
        branch = tree
        for name in path:
            branch = branch.setdefault(name, {})
            if not isinstance(branch, dict):
                raise SettingsInvalid(f"--set {assignment}: {name} was given a plain value before")
        branch[leaf] = _read_value(value)
    return tree


def masked(settings: Settings) -> dict[str, Any]:
    """The settings as JSON values, secrets replaced by stars."""
    return _mask(settings.model_dump(mode="json"))


def _read_value(value: str) -> Any:
    """Lists and tables are JSON; everything else stays text and is read by the setting's own type."""
    if value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise SettingsInvalid(f"{value}: not valid JSON: {error}") from error
    return value


def _config_file() -> Path | None:
    named = os.environ.get(CONFIG_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise SettingsInvalid(f"{CONFIG_VARIABLE} names {named}, and there is no such file")
        return Path(named)
    return Path(CONFIG_FILE) if Path(CONFIG_FILE).is_file() else None


# Where the tests find a Kafka and a Collector; whoever has set them can still run the rest.
_OF_THE_TESTS = ("KAFKA_HOME", "OTELCOL")


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    known = {name.upper() for name in Settings.model_fields} | {"CONFIG", TAG.removeprefix(PREFIX), *_OF_THE_TESTS}
    unknown = [
        name
        for name in sorted(environment)
        if name.startswith(PREFIX) and name.removeprefix(PREFIX).split("__")[0].upper() not in known
    ]
    if unknown:
        raise SettingsInvalid("\n".join(f"{name}: no such setting; `flywheel config` shows all" for name in unknown))


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"{key}: no such setting; `flywheel config` shows all")
        else:
            lines.append(f"{key}: {problem['msg']}")
    return "\n".join(lines)


def _resolve(settings: Settings) -> Settings:
    home = settings.home.expanduser().absolute()
    derived: dict[str, dict[str, Any]] = {
        "storage": {"artifacts": home / "artifacts"},
        "feedback": {"outbox": home / "outbox"},
        "serving": {"model": home / "models" / BASE_MODEL},
    }
    rooms: dict[str, Any] = {}
    for name, defaults in derived.items():
        room: BaseModel = getattr(settings, name)
        given = room.model_fields_set
        update = {
            key: getattr(room, key).expanduser().absolute() if key in given else default
            for key, default in defaults.items()
        }
        if name == "storage" and not settings.storage.dsn:
            update["dsn"] = embedded_dsn(home)
        rooms[name] = room.model_copy(update=update)
    return settings.model_copy(update={"home": home, **rooms})


def _mask(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _mask(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_mask(inner, key) for inner in value]
    if isinstance(value, str) and value:
        if _SECRET_KEY.search(key):
            return "********"
        if key == "dsn":
            return _DSN_PASSWORD.sub(lambda found: f"{found[1] or found[3]}********", value)
    return value
