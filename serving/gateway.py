"""The REST API: a FastAPI application over an engine client, a router and an outbox.

A request is checked before anything is asked of an engine (size, JSON, key, scope, field types, model), then
routed, answered and recorded. Guarantees: every error has OpenAI's shape and an id; bad input is a 4xx; no
request waits for the database; over max_concurrency requests are answered 503 at once. Limits per key are
not here yet.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from feedback.events import new_response_id
from serving.answers import ClientGone, EventStream, answer_headers, error_response, traceparent_of, until_disconnect
from serving.comparisons import compare
from serving.errors import ApiError, MethodNotAllowed, NotFound, Overloaded
from serving.exchange import Caller, EngineClient, Exchange
from serving.keys import ApiKey, bearer_secret, check, digest_of
from serving.recorder import Recorder
from serving.requests import ChatRequest, ComparisonRequest, parse_model, read_body
from serving.routing import Router
from serving.settings import ServingSettings
from serving.votes import accept_vote, parse_vote

log = logging.getLogger(__name__)
_CLOSED_REQUEST = 499  # nobody reads it; the number that proxies log for a client that left
_REMEMBERED_MISSES = 4096
_MOST_WAIT_FOR_KEYS = 16

Handler = Callable[[Request], Awaitable[Response]]


@dataclass
class Gateway:
    """What the endpoints work with. under_way: requests being answered now."""

    settings: ServingSettings
    engine: EngineClient
    router: Router
    recorder: Recorder
    under_way: int = 0
    _unknown_keys: dict[str, None] = field(default_factory=dict)  # digests, the oldest first
    _waiting_for_keys: int = 0

    async def authorize(self, request: Request, scope: str) -> ApiKey:
        """The caller's key. Raises Unauthenticated, MissingScope.

        A key that is not in the table may have been made a moment ago: the first time, wait for a new reading.
        Few may wait at once, or callers without a key would fill every slot.
        """
        secret = bearer_secret(request.headers.get("authorization"))
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

    def caller(self, request: Request, key: ApiKey, body: ChatRequest) -> Caller:
        """Who asks: OpenAI's fields first, then the headers."""
        user = body.user or body.safety_identifier or request.headers.get("x-flywheel-user")
        session_id = request.headers.get("x-flywheel-session")
        return Caller(key, (user or "")[:256] or None, (session_id or "")[:256] or None, traceparent_of(request))

    def close_exchange(self, exchange: Exchange) -> None:
        """Free the engine, record the answer, and give the slot back."""
        self.under_way -= 1
        exchange.cancel()
        self.recorder.record_later([exchange.interaction()])

    async def chat(self, request: Request, response_id: str) -> Response:
        """POST /v1/chat/completions."""
        started = time.perf_counter()
        key = await self.authorize(request, "inference")
        body = parse_model(await read_body(request, self.settings.max_body_bytes), ChatRequest)
        caller = self.caller(request, key, body)
        route = self.router.table.route(body.model, caller.user or caller.session_id or response_id)
        exchange = Exchange(
            response_id=response_id,
            route=route,
            request=body,
            caller=caller,
            started=started,
            timeout_s=self.settings.request_timeout_s,
        )
        streamed = False
        try:
            await until_disconnect(request, exchange.open(self.engine))
            if body.stream:
                streamed = True
                self.under_way += 1  # close_exchange gives it back
                return EventStream(exchange, self.close_exchange)
            whole = await until_disconnect(request, exchange.read_whole())
        except ApiError as error:
            if error.status >= 500:
                self.recorder.record_later([exchange.interaction()])
            raise
        except ClientGone:
            self.recorder.record_later([exchange.interaction()])
            return Response(status_code=_CLOSED_REQUEST)
        except asyncio.CancelledError:  # Ray Serve cancels the task of a client that left
            self.recorder.record_later([exchange.interaction()])
            raise
        finally:
            if not streamed:
                exchange.cancel()
        headers = answer_headers(exchange)
        await self.recorder.record([exchange.interaction()])
        return Response(whole, media_type="application/json", headers=headers)

    async def comparison(self, request: Request, response_id: str) -> Response:
        """POST /v1/comparisons."""
        started = time.perf_counter()
        key = await self.authorize(request, "inference")
        body = parse_model(await read_body(request, self.settings.max_body_bytes), ComparisonRequest)
        if body.checkpoints is not None:
            key = await self.authorize(request, "evaluate")
        caller = self.caller(request, key, body)
        try:
            answer = await until_disconnect(request, compare(self, body, caller, started))
        except ClientGone:
            return Response(status_code=_CLOSED_REQUEST)
        return JSONResponse(answer, headers={"x-flywheel-response-id": response_id, "traceparent": caller.traceparent})

    async def feedback(self, request: Request, response_id: str) -> Response:
        """POST /v1/feedback."""
        key = await self.authorize(request, "feedback")
        raw = await read_body(request, self.settings.max_body_bytes)
        vote = parse_vote(raw, key, request.headers.get("idempotency-key"))
        accepted = await accept_vote(vote, self.recorder.outbox)
        return JSONResponse(accepted, status_code=202, headers={"x-flywheel-response-id": response_id})

    async def models(self, request: Request, response_id: str) -> Response:
        """GET /v1/models: the aliases, then the checkpoints, that can be served now."""
        await self.authorize(request, "inference")
        table = self.router.table
        names = {alias: target for alias, target in sorted(table.aliases.items()) if target in table.servable}
        names |= {checkpoint_id: checkpoint_id for checkpoint_id in sorted(table.servable)}
        data = [
            {"id": name, "object": "model", "created": table.active[root], "owned_by": "flywheel", "root": root}
            for name, root in names.items()
        ]
        return JSONResponse({"object": "list", "data": data}, headers={"x-flywheel-response-id": response_id})

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
    for path, handler, method in (
        ("/v1/chat/completions", gateway.chat, "POST"),
        ("/v1/comparisons", gateway.comparison, "POST"),
        ("/v1/feedback", gateway.feedback, "POST"),
        ("/v1/models", gateway.models, "GET"),
    ):
        app.add_route(path, _guarded(gateway, handler), methods=[method])
    app.add_route("/health/live", gateway.live, methods=["GET"])
    app.add_route("/health/ready", gateway.ready, methods=["GET"])
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_exception_handler(Exception, _unexpected)
    return app


def _guarded(gateway: Gateway, handler: Callable[[Request, str], Awaitable[Response]]) -> Handler:
    """Give the request an id and a slot, and turn ApiError into an answer."""

    async def endpoint(request: Request) -> Response:
        response_id = new_response_id()
        if gateway.under_way >= gateway.settings.max_concurrency:
            return error_response(Overloaded("Too many requests are under way.", retry_after_s=1), response_id)
        gateway.under_way += 1
        try:
            return await handler(request, response_id)
        except ApiError as error:
            return error_response(error, response_id)
        except ClientDisconnect:  # it left while it sent its body
            return Response(status_code=_CLOSED_REQUEST)
        finally:
            gateway.under_way -= 1

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
