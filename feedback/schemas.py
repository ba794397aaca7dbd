"""The contract for people who consume the topics: JSON Schemas of the values, and an AsyncAPI 3.0 document.

Both are made from feedback/events.py. `breaking_changes` says whether a newer schema would break somebody who reads
or writes by the older one: evolution is additive.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any

from feedback.events import (
    CHECKPOINTS_TOPIC,
    FEEDBACK,
    FEEDBACK_TOPIC,
    INTERACTIONS_TOPIC,
    PREFERENCES_TOPIC,
    CheckpointEvent,
    Interaction,
    Preference,
)
from feedback.topics import DEAD_LETTER_SUFFIX

_ABOUT = {
    INTERACTIONS_TOPIC: ("Every answer of the API, whole or aborted.", "the response id"),
    FEEDBACK_TOPIC: ("Every vote.", "what the vote is about: a response, comparison or session, or two responses"),
    PREFERENCES_TOPIC: ("What the votes say about pairs of answers, with revisions.", "the preference id"),
    CHECKPOINTS_TOPIC: ("What became of the checkpoints.", "the checkpoint id"),
}
_CLOUD_EVENTS_HEADERS = ("ce_specversion", "ce_id", "ce_source", "ce_type", "ce_time", "content-type")


def topic_schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schema of each topic's values."""
    return {
        INTERACTIONS_TOPIC: Interaction.model_json_schema(),
        FEEDBACK_TOPIC: FEEDBACK.json_schema(),
        PREFERENCES_TOPIC: Preference.model_json_schema(),
        CHECKPOINTS_TOPIC: CheckpointEvent.model_json_schema(),
    }


def asyncapi(bootstrap_servers: str, version: str) -> dict[str, Any]:
    """An AsyncAPI 3.0 document: server, channels, messages with CloudEvents headers, keys and schemas."""
    host, *_ = bootstrap_servers.split(",")
    channels, operations = {}, {}
    for topic, schema in topic_schemas().items():
        about, key = _ABOUT[topic]
        name = topic.split(".")[1]
        channels[name] = {
            "address": topic,
            "description": f"{about} What can't be read goes to {topic}{DEAD_LETTER_SUFFIX}.",
            "messages": {
                name: {
                    "name": name,
                    "contentType": "application/json",
                    "headers": {
                        "type": "object",
                        "required": list(_CLOUD_EVENTS_HEADERS),
                        "properties": {header: {"type": "string"} for header in _CLOUD_EVENTS_HEADERS},
                    },
                    "payload": {"schemaFormat": "application/schema+json;version=draft-2020-12", "schema": schema},
                    "bindings": {"kafka": {"key": {"type": "string", "description": key}}},
                }
            },
        }
        operations[f"receive_{name}"] = {"action": "send", "channel": {"$ref": f"#/channels/{name}"}}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Flywheel's topics",
            "version": version,
            "description": "CloudEvents 1.0 in Kafka's binary mode. Delivery is at least once: `ce_id` tells repeats. "
            "A record without a value (`ce_type` flywheel.erased.v1) says that the event `ce_subject` was erased.",
        },
        "defaultContentType": "application/json",
        "servers": {"kafka": {"host": host, "protocol": "kafka"}},
        "channels": channels,
        "operations": operations,
    }


def breaking_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Why `new` is not an additive evolution of the JSON Schema `old`, one line for each reason; none if it is.

    Whatever was valid must stay valid, and every field that a reader may rely on must stay there with its type.
    """
    return list(_compare(old, new, old, new, "", set()))


def _compare(
    old: Any, new: Any, old_root: dict[str, Any], new_root: dict[str, Any], path: str, seen: set[str]
) -> Iterator[str]:
    if path in seen or not isinstance(old, dict) or not isinstance(new, dict):
        return
    seen.add(path)
    old, new = _resolved(old, old_root), _resolved(new, new_root)
    here = path or "the value"
    if old.get("type") != new.get("type"):
        yield f"{here}: type {old.get('type')} became {new.get('type')}"
    gone = [value for value in old.get("enum", []) if value not in new.get("enum", [])]
    if gone or ("enum" in new and "enum" not in old):
        yield f"{here}: fewer values are allowed"
    if "const" in new and old.get("const") != new["const"]:
        yield f"{here}: must be {new['const']!r}"
    for bound, tighter in _BOUNDS.items():
        if bound in new and (bound not in old or tighter(old[bound], new[bound])):
            yield f"{here}: {bound} is now {new[bound]}"
    for name in sorted(set(new.get("required", [])) - set(old.get("required", []))):
        yield f"{path}/{name}: is required now"
    for name in sorted(set(old.get("required", [])) - set(new.get("required", []))):
        yield f"{path}/{name}: need not be there any more"
    for name, part in old.get("properties", {}).items():
        if name in new.get("properties", {}):
            yield from _compare(part, new["properties"][name], old_root, new_root, f"{path}/{name}", seen)
        else:
            yield f"{path}/{name}: is gone"
    for word in ("items", "additionalProperties"):
        yield from _compare(old.get(word), new.get(word), old_root, new_root, f"{path}/{word}", seen)
    for word in ("oneOf", "anyOf"):
        yield from _compare_members(old.get(word, []), new.get(word, []), old_root, new_root, path, seen)


def _compare_members(
    old: list[Any], new: list[Any], old_root: dict[str, Any], new_root: dict[str, Any], path: str, seen: set[str]
) -> Iterator[str]:
    """Members of a union are known by their reference, or by their type."""
    members = {_name(part): part for part in new}
    for part in old:
        name = _name(part)
        if name in members:
            yield from _compare(part, members[name], old_root, new_root, f"{path}/{name}", seen)
        else:
            yield f"{path or 'the value'}: {name} is no longer allowed"


# Tighter than before: a larger lower bound, a smaller upper one, another pattern.
_BOUNDS: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems"), operator.lt),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), operator.gt),
    **dict.fromkeys(("pattern", "format"), operator.ne),
}


def _name(part: dict[str, Any]) -> str:
    return str(part.get("$ref", part.get("type"))).rsplit("/", 1)[-1]


def _resolved(part: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in part:
        return part
    found: dict[str, Any] = root["$defs"][_name(part)]
    return found
