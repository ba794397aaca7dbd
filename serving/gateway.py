"""The REST API: a FastAPI application over an engine client, a router and an outbox.

A request is checked before anything is asked of an engine (size, JSON, key, scope, field types, model), then
routed, answered and recorded. Guarantees: every error has OpenAI's shape and an id; bad input is a 4xx; no
request waits for the database; over max_concurrency requests are answered 503 at once, over a key's own limits
429; a request is counted against its key from its headers on, so one key can't fill the slots with slow bodies.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from feedback.events import AnyVote, new_response_id
from serving.answers import ClientGone, EventStream, answer_headers, error_response, traceparent_of, until_disconnect
from serving.comparisons import Comparison
from serving.dialects import CHAT, DIALECTS, ComparisonRequest, Dialect, UtilityRequest
from serving.errors import ApiError, MethodNotAllowed, NotFound, Overloaded
from serving.exchange import Caller, EngineClient, Exchange, ask_engine
from serving.experiment_endpoints import ExperimentEndpoints, Experiments
from serving.feedback_endpoints import FeedbackEndpoints
from serving.feedback_tokens import HEADER as TOKEN_HEADER
from serving.feedback_tokens import make_token
from serving.keys import ApiKey, check, digest_of, sent_secret
from serving.limits import Admission, Limits
from serving.recorder import Recorder
from serving.requests import USER_LENGTH, parse_model, read_body
from serving.routing import Router
from serving.settings import ServingSettings
from serving.shadows import Shadows
from serving.vote_limits import VoteLimits
from serving.votes import VoteDesk
from telemetry.metrics import CONTENT_TYPE

log = logging.getLogger(__name__)
_CLOSED_REQUEST = 499  # nobody reads it; the number that proxies log for a client that left
_REMEMBERED_MISSES = 4096
_MOST_WAIT_FOR_KEYS = 16
_METRICS_TIMEOUT_S = 5.0

# vLLM's calls that generate no text.
UTILITIES = (
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions/render",
    "/v1/completions/derender",
    "/generative_scoring",
)

Endpoint = Callable[[Request, str], Awaitable[Response]]


class StoredVotes(Protocol):
    """The part of serving.vote_store.VoteStore that the endpoints use."""

    async def votes_on(self, response_id: str, api_key_id: str) -> list[dict[str, Any]]:
        """The stored votes of that key on a response, oldest first. Raises Overloaded when the store is away."""

    async def erase(self, name: str) -> dict[str, Any]:
        """Erase a person's answers and votes; returns what went. Raises Overloaded when the store is away."""


@dataclass
class Gateway:
    """What the endpoints work with. tell_vote: hears of each accepted vote; under_way: requests being answered now."""

    settings: ServingSettings
    engine: EngineClient
    router: Router
    recorder: Recorder
    votes: StoredVotes
    experiments: Experiments
    tell_vote: Callable[[AnyVote], None] | None = None
    under_way: int = 0
    _unknown_keys: dict[str, None] = field(default_factory=dict)  # digests, the oldest first
    _waiting_for_keys: int = 0

    def __post_init__(self) -> None:
        replicas = max(self.settings.gateway_replicas, self.settings.gateway_replicas_max)
        self.limits = Limits(replicas)
        vote_limits = VoteLimits(
            self.settings.key_votes_per_minute, self.settings.rater_votes_per_minute, replicas=replicas
        )
        self.shadows = Shadows(
            self.engine, self.recorder, self.settings.shadows_at_once, self.settings.request_timeout_s
        )
        self.desk = VoteDesk(self.recorder.outbox, vote_limits, self.tell_vote)

    async def authorize(self, request: Request, scope: str) -> ApiKey:
        """The caller's key. Raises Unauthenticated, MissingScope.

        A key that is not in the table may have been made a moment ago: the first time, wait for a new reading.
        Few may wait at once, or callers without a key would fill every slot.
        """
        secret = sent_secret(request.headers.get("authorization"), request.headers.get("x-api-key"))
        digest = digest_of(secret)
        table = self.router.table
        is_new = digest not in table.keys and digest not in self._unknown_keys
        if is_new and self._waiting_for_keys < _MOST_WAIT_FOR_KEYS:
            self._waiting_for_keys += 1
            try:
                table = await self.router.fresh()
            finally:
                self._waiting_for_keys -= 1
            if digest not in table.keys:
                self._unknown_keys[digest] = None
                if len(self._unknown_keys) > _REMEMBERED_MISSES:
                    del self._unknown_keys[next(iter(self._unknown_keys))]
        return check(table.keys, secret, scope)

    async def body(self, request: Request) -> bytes:
        return await read_body(request, self.settings.max_body_bytes, self.settings.body_timeout_s)

    def caller(self, request: Request, key: ApiKey, asked_by: str | None) -> Caller:
        """Who asks: the body's own fields first, then the headers."""
        user = asked_by or request.headers.get("x-flywheel-user")
        session_id = request.headers.get("x-flywheel-session")
        return Caller(
            key, (user or "")[:USER_LENGTH] or None, (session_id or "")[:USER_LENGTH] or None, traceparent_of(request)
        )

    async def generate(self, request: Request, response_id: str, dialect: Dialect) -> Response:
        """One answer in one of the APIs that generate text, whole or as a stream, recorded however it ends."""
        started = time.perf_counter()
        key = await self.authorize(request, "inference")
        admission = self.limits.admit(key)
        exchange: Exchange | None = None
        handed_over = False
        try:
            exchange = await self._exchange(request, response_id, dialect, key, started)
            await until_disconnect(request, exchange.open(self.engine))
            if exchange.streams:
                self.under_way += 1  # _end_stream gives it back
                handed_over = True
                end = partial(self._end_stream, exchange, admission)
                headers = self._headers(exchange, admission)
                return EventStream(exchange.pieces(), headers, end, named=exchange.dialect.named_events)
            whole = await until_disconnect(request, exchange.read_whole())
        except (ApiError, ClientGone, asyncio.CancelledError) as error:  # Ray Serve cancels when a client leaves
            if exchange is not None and (not isinstance(error, ApiError) or error.status >= 500):
                self.recorder.record_later([exchange.interaction()])
            raise
        finally:
            if not handed_over:
                if exchange is not None:
                    exchange.cancel()
                admission.end(exchange.tokens_used if exchange else 0)
        headers = self._headers(exchange, admission)
        await self.recorder.record([exchange.interaction()])
        self.shadows.consider(exchange, self.router.table)
        return Response(whole, media_type="application/json", headers=headers)

    def _headers(self, exchange: Exchange, admission: Admission) -> dict[str, str]:
        token = self._feedback_token(exchange.caller.key, exchange.response_id)
        return answer_headers(exchange) | admission.headers | token

    async def _exchange(
        self, request: Request, response_id: str, dialect: Dialect, key: ApiKey, started: float
    ) -> Exchange:
        """Read the body and route it; the engine has heard nothing yet."""
        body = parse_model(await self.body(request), dialect.request)
        caller = self.caller(request, key, body.asked_by)
        return Exchange(
            response_id=response_id,
            route=self.router.table.route(body.model, caller.units(response_id)),
            request=body,
            caller=caller,
            started=started,
            timeout_s=self.settings.request_timeout_s,
            dialect=dialect,
        )

    def _end_stream(self, exchange: Exchange, admission: Admission) -> None:
        """The stream is over: free the engine, record the answer, give the slot back."""
        self.under_way -= 1
        exchange.cancel()
        admission.end(exchange.tokens_used)
        self.recorder.record_later([exchange.interaction()])
        self.shadows.consider(exchange, self.router.table)

    async def utility(self, request: Request, response_id: str, path: str) -> Response:
        """A call of vLLM's that generates no text (tokenize and the like): routed by its model, not recorded."""
        key = await self.authorize(request, "inference")
        admission = self.limits.admit(key)
        try:
            body = parse_model(await self.body(request), UtilityRequest)
            caller = self.caller(request, key, None)
            model = body.model or self.settings.alias
            route = self.router.table.route(model, caller.units(response_id))
            content = {**body.model_dump(exclude_unset=True), "model": route.checkpoint_id}
            work = ask_engine(self.engine, route.base_id, path, content, self.settings.request_timeout_s)
            whole = await until_disconnect(request, work)
        finally:
            admission.end()
        headers = {
            "x-flywheel-response-id": response_id,
            "x-flywheel-checkpoint": route.checkpoint_id,
            "traceparent": caller.traceparent,
        }
        return Response(whole, media_type="application/json", headers=headers | admission.headers)

    async def comparison(self, request: Request, response_id: str) -> Response:
        """POST /v1/comparisons: two answers, whole or as one stream, recorded however they end."""
        started = time.perf_counter()
        key = await self.authorize(request, "inference")
        admission = self.limits.admit(key)
        pair: Comparison | None = None
        handed_over = False
        try:
            body = parse_model(await self.body(request), ComparisonRequest)
            if body.checkpoints is not None:
                key = await self.authorize(request, "evaluate")
            pair = Comparison(self, body, self.caller(request, key, body.asked_by), started)
            headers = {"x-flywheel-response-id": response_id, "traceparent": pair.caller.traceparent}
            headers |= admission.headers | self._feedback_token(key, pair.comparison_id)
            if body.stream:
                await until_disconnect(request, pair.open())
                self.under_way += 1  # _end_comparison gives it back
                handed_over = True
                return EventStream(pair.events(), headers, partial(self._end_comparison, pair, admission))
            return JSONResponse(await until_disconnect(request, pair.whole()), headers=headers)
        finally:
            if not handed_over:
                if pair is not None:
                    pair.end()
                admission.end(pair.tokens_used if pair else 0)

    def _end_comparison(self, pair: Comparison, admission: Admission) -> None:
        """The stream is over: free the engine, record the answers, give the slot back."""
        self.under_way -= 1
        pair.end()
        admission.end(pair.tokens_used)

    def _feedback_token(self, key: ApiKey, target: str) -> dict[str, str]:
        """The header with the token for an answer, if its key may vote at all."""
        digest = self.router.table.digests.get(key.key_id)
        if digest is None or "feedback" not in key.scopes or not self.settings.feedback_token_s:
            return {}
        return {TOKEN_HEADER: make_token(key, digest, target, self.settings.feedback_token_s)}

    async def models(self, request: Request, response_id: str) -> Response:
        """GET /v1/models: the aliases, then the checkpoints, that can be served now."""
        await self.authorize(request, "inference")
        content = {"object": "list", "data": self._models()}
        return JSONResponse(content, headers={"x-flywheel-response-id": response_id})

    async def model(self, request: Request, response_id: str) -> Response:
        """GET /v1/models/{name}: one of them."""
        await self.authorize(request, "inference")
        name = request.path_params["name"]
        for model in self._models():
            if model["id"] == name:
                return JSONResponse(model, headers={"x-flywheel-response-id": response_id})
        raise NotFound(f"The model `{name}` does not exist.", param="model", code="model_not_found")

    def _models(self) -> list[dict[str, Any]]:
        table = self.router.table
        names = {alias: target for alias, target in sorted(table.aliases.items()) if target in table.servable}
        names |= {checkpoint_id: checkpoint_id for checkpoint_id in sorted(table.servable)}
        return [
            {"id": name, "object": "model", "created": table.active[root], "owned_by": "flywheel", "root": root}
            for name, root in names.items()
        ]

    async def metrics(self, request: Request, response_id: str) -> Response:
        """GET /metrics: this gateway's, then those of one engine replica of each model, in Prometheus' text format."""
        await self.authorize(request, "admin")
        pieces = [self.recorder.metrics.exposition(self.under_way)]
        for base_id in sorted(set(self.router.table.servable.values())):
            pieces.append(await ask_engine(self.engine, base_id, "/metrics", None, _METRICS_TIMEOUT_S))
        return Response(b"".join(pieces), media_type=CONTENT_TYPE, headers={"x-flywheel-response-id": response_id})

    async def live(self, request: Request) -> Response:
        """GET /health/live: the process answers."""
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """GET /health/ready: 200 when the alias can be served."""
        table = self.router.table
        target = table.aliases.get(self.settings.alias)
        if target is None or target not in table.servable:
            return JSONResponse({"status": "starting", "alias": self.settings.alias}, status_code=503)
        return JSONResponse({"status": "ready"})


def build_app(gateway: Gateway) -> FastAPI:
    """The application. Its own API pages are off: nothing but the health endpoints answers without a key."""
    app = FastAPI(title="Flywheel", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

    def add(path: str, handler: Endpoint, method: str = "POST", prefix: str = CHAT.id_prefix) -> None:
        app.add_route(path, _guarded(gateway, handler, prefix), methods=[method])

    for dialect in DIALECTS:
        add(dialect.path, partial(gateway.generate, dialect=dialect), prefix=dialect.id_prefix)
    for path in UTILITIES:
        add(path, partial(gateway.utility, path=path))
    add("/v1/comparisons", gateway.comparison)
    for path, method, handler in ExperimentEndpoints(gateway, gateway.experiments).routes():
        add(path, handler, method)
    feedback = FeedbackEndpoints(gateway)
    add("/v1/feedback", feedback.vote)
    add("/v1/feedback/batch", feedback.batch)
    add("/v1/logs", feedback.evaluations)
    add("/v1/responses/{name}/feedback", feedback.votes_on, "GET")
    add("/v1/subjects/{name:path}", feedback.erase, "DELETE")
    add("/v1/models", gateway.models, "GET")
    add("/metrics", gateway.metrics, "GET")
    add("/v1/models/{name}", gateway.model, "GET")
    app.add_route("/health/live", gateway.live, methods=["GET"])
    app.add_route("/health/ready", gateway.ready, methods=["GET"])
    if gateway.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=gateway.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_exception_handler(Exception, _unexpected)
    return app


def _guarded(gateway: Gateway, handler: Endpoint, prefix: str) -> Callable[[Request], Awaitable[Response]]:
    """Give the request an id and a slot, turn ApiError into an answer, and count it."""

    async def answer(request: Request, response_id: str) -> Response:
        if gateway.under_way >= gateway.settings.max_concurrency:
            return error_response(Overloaded("Too many requests are under way.", retry_after_s=1), response_id)
        gateway.under_way += 1
        try:
            return await handler(request, response_id)
        except ApiError as error:
            return error_response(error, response_id)
        except (ClientGone, ClientDisconnect):  # it left, perhaps while it sent its body
            return Response(status_code=_CLOSED_REQUEST)
        finally:
            gateway.under_way -= 1

    async def endpoint(request: Request) -> Response:
        answered = await answer(request, new_response_id(prefix))
        gateway.recorder.metrics.count_request(request.scope["route"].path, answered.status_code)
        return answered

    return endpoint


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        answer = error_response(MethodNotAllowed(f"{request.url.path} does not take {request.method}."))
        answer.headers.update(error.headers or {})
        return answer
    return error_response(NotFound(f"There is nothing at {request.method} {request.url.path}."))


async def _unexpected(request: Request, error: Exception) -> Response:
    """A fault of ours: logged with its trace, told without."""
    log.error("unexpected error at %s %s", request.method, request.url.path, exc_info=error)
    fault = ApiError("The server made a mistake; it was logged.", code="internal_error")
    return error_response(fault)
