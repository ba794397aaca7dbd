"""Laws of the documents: what they tell people to type exists."""

import re
import shlex

import click
import pytest
import typer

from flywheel.cli import app
from tests.helpers.documents import API, BROKER, blocks, documents, programs
from tests.helpers.servers import ROOT

COMMANDS = [(where, line) for where, text in blocks("") for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(("where", "line"), COMMANDS, ids=[line.split("#")[0].strip() for _, line in COMMANDS])
def every_command_in_the_documents_exists_with_its_options(where: str, line: str) -> None:
    program, *words = shlex.split(line, comments=True)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[0] in targets, where
        return
    assert program == "flywheel", where
    command: click.Command = typer.main.get_command(app)
    context = click.Context(command)
    while isinstance(command, click.Group):
        context = command.make_context(command.name, words, parent=context)
        _, command, words = command.resolve_command(context, context._protected_args + context.args)
        assert command is not None, where
    command.make_context(command.name, list(words), parent=context)


def every_program_speaks_to_something_that_the_tests_start() -> None:
    assert len(programs(API)) + len(programs(BROKER)) == len(list(blocks("python")))


def every_link_to_a_file_leads_somewhere() -> None:
    broken = [
        f"{path.name}: {target}"
        for path in documents()
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert not broken
