"""Twins for the gateway's seams: an engine that answers from a script, and a router that stands still."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI

from feedback.events import AnyEvent, AnyVote, Interaction, target_of
from serving.asgi import Head
from serving.assignment import allocate
from serving.errors import NotFound, UpstreamError
from serving.experiment_plan import Arm, Experiment, Namespace, Unit
from serving.gateway import Gateway, build_app
from serving.keys import ApiKey, digest_of
from serving.recorder import Recorder
from serving.routing import RoutingTable
from serving.settings import ServingSettings
from telemetry.metrics import GatewayMetrics

SECRET = "fw-test-secret"
BASE = "flash-base-000000"
CANDIDATE = "flash-r0001-000000"
ASK: dict[str, Any] = {"model": "flash", "messages": [{"role": "user", "content": "Hi?"}]}


def build_table(**overrides: Any) -> RoutingTable:
    """Two servable checkpoints, one alias, one key with all scopes but admin."""
    key = ApiKey("key-1", "test", frozenset({"inference", "feedback", "evaluate"}))
    values: dict[str, Any] = {
        "keys": {digest_of(SECRET): key},
        "aliases": {"flash": BASE},
        "active": {BASE: 1, CANDIDATE: 2},
        "servable": {BASE: BASE, CANDIDATE: BASE},
    }
    return RoutingTable(**{**values, **overrides})


def build_experiment(**overrides: Any) -> Experiment:
    """A running test of CANDIDATE against BASE, half and half."""
    arms = overrides.get("arms") or (
        Arm(name="control", checkpoint_id=BASE, weight=0.5),
        Arm(name="candidate", checkpoint_id=CANDIDATE, weight=0.5),
    )
    values: dict[str, Any] = {
        "experiment_id": "exp-1",
        "alias": "flash",
        "namespace": "flash",
        "salt": "salt",
        "arms": arms,
        "allocation": allocate({arm.name: arm.weight for arm in arms}),
    }
    return Experiment(**{**values, **overrides})


def build_experiments(*experiments: Experiment, unit: Unit = "user") -> dict[str, Any]:
    """What a routing table holds of running experiments: they divide the namespaces by their shares."""
    names = sorted({experiment.namespace for experiment in experiments})
    return {
        "experiments": {experiment.experiment_id: experiment for experiment in experiments},
        "namespaces": {
            name: Namespace(
                namespace=name,
                unit=unit,
                allocation=allocate({one.experiment_id: one.share for one in experiments if one.namespace == name}),
            )
            for name in names
        },
    }


@dataclass
class MemoryExperiments:
    """A registry of experiments that has none."""

    def __getattr__(self, name: str) -> Any:
        async def refuse(*_: Any) -> Any:
            raise NotFound("No experiment is called so.")

        return refuse


@dataclass
class StillRouter:
    """A router whose table changes only when a test changes it."""

    table: RoutingTable = field(default_factory=build_table)

    async def fresh(self) -> RoutingTable:
        return self.table


@dataclass
class MemoryOutbox:
    """An outbox that remembers; `error` makes it refuse."""

    events: list[AnyEvent] = field(default_factory=list)
    error: Exception | None = None

    def append(self, events: Sequence[AnyEvent]) -> "Future[list[str]]":
        if self.error is not None:
            raise self.error
        future: Future[list[str]] = Future()
        known = {event.event_id for event in self.events}
        future.set_result(["duplicate" if event.event_id in known else "accepted" for event in events])
        self.events += [event for event in events if event.event_id not in known]
        return future

    @property
    def interactions(self) -> list[Interaction]:
        return [event for event in self.events if isinstance(event, Interaction)]


@dataclass
class MemoryVotes:
    """The votes of an outbox, as if they had reached the store."""

    outbox: MemoryOutbox
    erased: list[str] = field(default_factory=list)

    async def erase(self, name: str) -> dict[str, Any]:
        self.erased.append(name)
        return {"votes": 0}

    async def votes_on(self, response_id: str, api_key_id: str) -> list[dict[str, Any]]:
        return [
            event.model_dump(mode="json")
            for event in self.outbox.events
            if not isinstance(event, Interaction) and target_of(event) == response_id and event.api_key_id == api_key_id
        ]


class ScriptedCall:
    """One call of the scripted engine."""

    def __init__(self, messages: AsyncIterator[Head | bytes]) -> None:
        self._messages = messages
        self.cancelled = False

    def __aiter__(self) -> "ScriptedCall":
        return self

    async def __anext__(self) -> Head | bytes:
        return await anext(self._messages)

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class ScriptedEngine:
    """Answers `words`, streamed or whole. pause_s: between words; fail_after: words before it dies."""

    words: Sequence[str] = ("Hello", " there", ".")
    finish_reason: str = "stop"
    pause_s: float = 0.0
    fail_after: int | None = None
    refusal: tuple[int, bytes] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    calls: list[ScriptedCall] = field(default_factory=list)

    def call(self, base_id: str, path: str, headers: list[tuple[str, str]], body: bytes) -> ScriptedCall:
        self.requests.append(json.loads(body))
        self.headers.append(dict(headers))
        call = ScriptedCall(self._answer(self.requests[-1], self.headers[-1]))
        self.calls.append(call)
        return call

    async def _answer(self, request: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[Head | bytes]:
        if self.refusal is not None:
            yield self.refusal[0], []
            yield self.refusal[1]
            return
        yield 200, []
        frame = {"id": f"chatcmpl-{headers['x-request-id']}", "model": request["model"]}
        usage = {"prompt_tokens": 5, "completion_tokens": len(self.words)}
        for number, word in enumerate(self.words):
            await asyncio.sleep(self.pause_s)
            if number == self.fail_after:
                raise UpstreamError("The engine stopped while it worked on this request.")
            if request.get("stream"):
                yield _event({**frame, "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]})
        if not request.get("stream"):
            message = {"role": "assistant", "content": "".join(self.words)}
            choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
            yield json.dumps({**frame, "choices": [choice], "usage": usage}).encode()
            return
        yield _event({**frame, "choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]})
        if (request.get("stream_options") or {}).get("include_usage"):
            yield _event({**frame, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


@dataclass
class Bench:
    """A gateway on twins, and a client that speaks to it."""

    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    router: StillRouter = field(default_factory=StillRouter)
    outbox: MemoryOutbox = field(default_factory=MemoryOutbox)
    settings: ServingSettings = field(default_factory=ServingSettings)
    tell_vote: Callable[[AnyVote], None] | None = None
    experiments: Any = field(default_factory=lambda: MemoryExperiments())

    def __post_init__(self) -> None:
        self.votes = MemoryVotes(self.outbox)
        self.gateway = Gateway(
            self.settings,
            self.engine,
            self.router,
            Recorder(self.outbox, GatewayMetrics("gateway-1")),
            self.votes,
            self.experiments,
            self.tell_vote,
        )
        self.app: FastAPI = build_app(self.gateway)

    def client(self, secret: str = SECRET) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False),
            base_url="http://gateway",
            headers={"authorization": f"Bearer {secret}"},
        )

    async def ask(self, **fields: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.post("/v1/chat/completions", json={**ASK, **fields})


def check_error(answer: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """The error is in OpenAI's shape, has an id, and shows no trace."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in answer.text
    assert answer.headers["x-flywheel-response-id"].startswith("chatcmpl-")
    if code is not None:
        assert error["code"] == code
    return error
