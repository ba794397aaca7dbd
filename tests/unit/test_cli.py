"""Laws of the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from flywheel.errors import SettingsInvalid
from flywheel.processes import home_tag

# What takes long to import; none of it may be needed to print a help text.
HEAVY = (
    "torch",
    "transformers",
    "vllm",
    "ray",
    "kafka",
    "fastapi",
    "numpy",
    "pyarrow",
    "psycopg",
    "pydantic_settings",
    "httpx",
)
COMMANDS = (
    (),
    ("up",),
    ("status",),
    ("down",),
    ("config",),
    ("demo",),
    ("serve",),
    ("relay",),
    ("ingest",),
    ("controller",),
    ("postgres",),
    ("broker",),
    ("migrate",),
    ("topics",),
    ("bench", "serving"),
    ("bench", "feedback"),
    ("model", "prepare"),
    ("feedback", "audit"),
    ("feedback", "schema"),
    ("feedback", "snapshot"),
    ("feedback", "dead-letters"),
    ("feedback", "replay"),
    ("key", "create"),
    ("key", "list"),
    ("checkpoint", "list"),
    ("rounds", "list"),
)


def run(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "flywheel", "--set", f"home={folder}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def the_help_texts_import_nothing_heavy() -> None:
    program = f"""
import sys
from typer.testing import CliRunner
from flywheel.cli import app
for command in {COMMANDS!r}:
    answer = CliRunner().invoke(app, [*command, "--help"])
    assert answer.exit_code == 0, (command, answer.output)
    assert "Usage" in answer.output, command
print(sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == "[]"


def an_error_of_ours_is_a_line_and_an_exit_code(tmp_path: Path) -> None:
    bad = run("--set", "serving.prot=1", "status", folder=tmp_path)
    assert bad.returncode == SettingsInvalid.exit_code
    assert bad.stderr == "flywheel: serving.prot: no such setting; `flywheel config` shows all\n"
    idle = run("down", folder=tmp_path)
    assert idle.returncode == 1
    assert "nothing runs" in idle.stderr
    unknown = run("up", "--only", "nothing", folder=tmp_path)
    assert unknown.returncode == SettingsInvalid.exit_code
    assert "no component is called nothing" in unknown.stderr


def a_home_that_can_not_be_made_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for home in (Path("/proc/nohome"), tmp_path / "file"):
        answer = run("up", "--detach", folder=home)
        assert answer.returncode == 1
        assert "can't be used" in answer.stderr
        assert "Traceback" not in answer.stderr


def a_command_that_needs_the_database_says_that_it_is_not_there(tmp_path: Path) -> None:
    answer = run("rounds", "list", folder=tmp_path)
    assert answer.returncode == 1
    assert "PostgreSQL" in answer.stderr
    assert "Traceback" not in answer.stderr


def the_status_of_nothing_is_exit_code_one(tmp_path: Path) -> None:
    answer = run("status", "--json", folder=tmp_path)
    assert answer.returncode == 1
    assert '"running": false' in answer.stdout


@pytest.mark.parametrize("other", ["home2", "home/inner"])
def each_home_has_its_own_tag(tmp_path: Path, other: str) -> None:
    assert home_tag(tmp_path / "home") != home_tag(tmp_path / other)
