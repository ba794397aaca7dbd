"""Laws of the settings tree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flywheel.embedded import embedded_dsn, socket_directory
from flywheel.errors import SettingsInvalid
from flywheel.settings import load_settings, masked, parse_assignments


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def the_command_line_wins_over_the_environment_over_the_file_over_the_default(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings().serving.port == 8000
    (empty_folder / "flywheel.toml").write_text("[serving]\nport = 8001\nalias = 'ours'\n")
    assert load_settings().serving.port == 8001
    monkeypatch.setenv("FLYWHEEL_SERVING__PORT", "8002")
    assert load_settings().serving.port == 8002
    settings = load_settings(**parse_assignments(["serving.port=8003"]))
    assert settings.serving.port == 8003
    assert settings.serving.alias == "ours"


def a_file_named_by_the_environment_replaces_the_one_in_the_working_folder(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "flywheel.toml").write_text("[serving]\nport = 8001\n")
    (empty_folder / "other.toml").write_text("[serving]\nalias = 'other'\n")
    monkeypatch.setenv("FLYWHEEL_CONFIG", "other.toml")
    assert load_settings().serving.port == 8000
    assert load_settings().serving.alias == "other"
    monkeypatch.setenv("FLYWHEEL_CONFIG", "missing.toml")
    with pytest.raises(SettingsInvalid, match=r"missing\.toml"):
        load_settings()


@pytest.mark.parametrize("text", ["[serving]\nprot = 1\n", "[servin]\nport = 1\n", "prot = 1\n"])
def an_unknown_key_in_the_file_is_an_error_that_names_it(empty_folder: Path, text: str) -> None:
    (empty_folder / "flywheel.toml").write_text(text)
    with pytest.raises(SettingsInvalid, match=r"prot|servin: no such setting"):
        load_settings()


@pytest.mark.parametrize("name", ["FLYWHEEL_SERVING__PROT", "FLYWHEEL_SERVIN__PORT", "FLYWHEEL_PORT"])
def an_unknown_variable_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsInvalid, match=r"(?i)prot|servin__port|flywheel_port"):
        load_settings()


@pytest.mark.parametrize("assignment", ["serving.prot=1", "servin.port=1", "serving.port", "serving.port=many"])
def a_bad_assignment_is_an_error(assignment: str) -> None:
    with pytest.raises(SettingsInvalid, match=r"serv"):
        load_settings(**parse_assignments([assignment]))


def a_broken_file_is_an_error_and_not_a_trace(empty_folder: Path) -> None:
    (empty_folder / "flywheel.toml").write_text("[serving\n")
    with pytest.raises(SettingsInvalid, match="not valid TOML"):
        load_settings()


def every_path_derives_from_home_unless_it_is_set(empty_folder: Path) -> None:
    settings = load_settings(home="state", storage={"artifacts": "kept"})
    home = empty_folder / "state"
    assert settings.home == home
    assert settings.feedback.outbox == home / "outbox"
    assert settings.serving.model == home / "models" / "smollm2-135m-instruct"
    assert settings.storage.artifacts == empty_folder / "kept"
    assert settings.storage.dsn == embedded_dsn(home)
    assert settings.embedded_postgres


def an_external_database_is_left_alone() -> None:
    settings = load_settings(storage={"dsn": "postgresql://ada:hidden@db.example/flywheel"})
    assert settings.storage.dsn == "postgresql://ada:hidden@db.example/flywheel"
    assert not settings.embedded_postgres


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://ada:hidden@db.example/x",
        "host=db password=hidden user=ada",
        r"host=db password='hid\'den hidden' user=ada",
    ],
)
def a_secret_is_never_printed(dsn: str) -> None:
    shown = json.dumps(masked(load_settings(storage={"dsn": dsn})))
    assert "hid" not in shown
    assert "ada" in shown


def the_socket_path_fits_however_deep_the_home_lies(empty_folder: Path) -> None:
    deep = empty_folder / ("d" * 60) / ("e" * 60)
    assert len(str(socket_directory(deep) / ".s.PGSQL.5432")) <= 107
    assert socket_directory(deep) != socket_directory(deep / "f")
    near = Path("/srv/home")
    assert socket_directory(near) == near / "postgres" / "socket"


def a_quote_in_the_home_path_does_not_break_the_connection_string() -> None:
    from psycopg.conninfo import conninfo_to_dict

    home = Path("/srv/o'brien \\ co")
    assert conninfo_to_dict(embedded_dsn(home))["host"] == str(home / "postgres" / "socket")


def the_config_command_prints_what_is_in_force() -> None:
    command = [sys.executable, "-m", "flywheel", "--set", "serving.port=8009", "config"]
    as_json = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(as_json.stdout)["serving"]["port"] == 8009
    as_toml = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    Path("flywheel.toml").write_text(as_toml.stdout)
    assert load_settings().serving.port == 8009


@pytest.mark.parametrize("name", ["FLYWHEEL_KAFKA_HOME", "FLYWHEEL_OTELCOL"])
def the_variables_of_the_tests_are_no_unknown_settings(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "/somewhere")
    load_settings()
