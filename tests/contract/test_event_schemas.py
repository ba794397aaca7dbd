"""The golden JSON Schemas of the events: a change of the contract shows as a change of a file.

To accept one: `python -m tests.contract.test_event_schemas`, and look at the difference. Additive only.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from feedback.events import FEEDBACK, VOTES, Interaction, Preference

GOLDEN = Path(__file__).parent / "golden"


def current_schemas() -> dict[str, dict[str, Any]]:
    """The schema of each topic's values, by file name."""
    return {
        "flywheel.interactions.v1": Interaction.model_json_schema(),
        "flywheel.feedback.v1": FEEDBACK.json_schema(),
        "flywheel.preferences.v1": Preference.model_json_schema(),
    }


def render(schema: dict[str, Any]) -> str:
    """The text of a golden file."""
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


@pytest.mark.parametrize("name", sorted(current_schemas()))
def the_schema_of_a_topic_is_the_golden_one(name: str) -> None:
    assert render(current_schemas()[name]) == (GOLDEN / f"{name}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("event_type", "table"), [(Interaction, "interactions"), *((vote, "feedback") for vote in VOTES)]
)
def every_field_of_an_event_is_a_column_of_its_table(event_type: type[BaseModel], table: str) -> None:
    """The migrations are read as text here; the integration tests insert into the real table."""
    columns: set[str] = set()
    for file in sorted((Path(__file__).parents[2] / "feedback/migrations").glob("*.sql")):
        for statement in file.read_text(encoding="utf-8").split(";"):
            if f"create table {table} (" in statement:
                columns |= {line.split()[0].strip('"') for line in statement.splitlines() if line.startswith("    ")}
            if f"alter table {table}\n" in statement:
                columns |= set(re.findall(r"add column (\w+)", statement))
    assert set(event_type.model_fields) <= columns


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for file_name, schema in current_schemas().items():
        (GOLDEN / f"{file_name}.json").write_text(render(schema), encoding="utf-8")
