"""The golden JSON Schemas of the events: a change of the contract shows as a change of a file.

To accept one: `python -m tests.contract.test_event_schemas`, which refuses what is not additive.
"""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from feedback.events import VOTES, Interaction
from feedback.schemas import asyncapi, breaking_changes, topic_schemas

GOLDEN = Path(__file__).parent / "golden"


def render(schema: dict[str, Any]) -> str:
    """The text of a golden file."""
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


@pytest.mark.parametrize("name", sorted(topic_schemas()))
def the_schema_of_a_topic_is_the_golden_one(name: str) -> None:
    assert render(topic_schemas()[name]) == (GOLDEN / f"{name}.json").read_text(encoding="utf-8")


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


def _changed(change: Callable[[dict[str, Any]], object]) -> list[str]:
    """What breaks when `change` is done to the schema of the votes."""
    old = topic_schemas()["flywheel.feedback.v1"]
    new = copy.deepcopy(old)
    change(new)
    return breaking_changes(old, new)


@pytest.mark.parametrize(
    "change",
    [
        lambda new: new["$defs"]["Thumb"]["properties"].pop("rater"),
        lambda new: new["$defs"]["Thumb"]["properties"]["value"]["enum"].pop(),
        lambda new: new["$defs"]["Thumb"]["required"].append("tags"),
        lambda new: new["$defs"]["Thumb"]["required"].remove("rater"),
        lambda new: new["$defs"]["Score"]["properties"]["value"].update(type="string"),
        lambda new: new["$defs"]["Score"]["properties"]["value"].update(minimum=0),
        lambda new: new["$defs"]["Comment"]["properties"]["text"].update(maxLength=10),
        lambda new: new["$defs"]["Comment"]["properties"]["response_id"]["anyOf"].pop(),
        lambda new: new["oneOf"].pop(),
    ],
)
def a_change_that_would_break_a_consumer_is_told(change: Callable[[dict[str, Any]], object]) -> None:
    assert _changed(change)


@pytest.mark.parametrize(
    "change",
    [
        lambda new: new["$defs"]["Thumb"]["properties"].update(mood={"type": "string", "default": ""}),
        lambda new: new["$defs"]["Thumb"]["properties"]["value"]["enum"].append("sideways"),
        lambda new: new["$defs"]["Comment"]["properties"]["text"].update(maxLength=1_000_000),
        lambda new: new["oneOf"].append({"type": "object"}),
        lambda new: new["$defs"]["Thumb"].update(description="Other words."),
    ],
)
def an_addition_breaks_nobody(change: Callable[[dict[str, Any]], object]) -> None:
    assert _changed(change) == []


def the_asyncapi_document_names_every_topic_with_its_schema() -> None:
    document = asyncapi("broker.example:9092,other:9092", "0.1.0")
    assert {channel["address"] for channel in document["channels"].values()} == set(topic_schemas())
    assert document["servers"]["kafka"]["host"] == "broker.example:9092"
    for operation in document["operations"].values():
        name = operation["channel"]["$ref"].removeprefix("#/channels/")
        [message] = document["channels"][name]["messages"].values()
        assert message["payload"]["schema"] == topic_schemas()[document["channels"][name]["address"]]


if __name__ == "__main__":
    for file_name, schema in topic_schemas().items():
        golden = GOLDEN / f"{file_name}.json"
        if golden.exists():
            broken = breaking_changes(json.loads(golden.read_text(encoding="utf-8")), schema)
            assert not broken, f"{file_name} would break its consumers: {'; '.join(broken)}"
        golden.write_text(render(schema), encoding="utf-8")
