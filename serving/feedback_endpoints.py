"""The endpoints about votes: to send them, one or many, in our words or OpenTelemetry's; to read them; to erase."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from feedback.events import is_response_id
from serving.errors import NotFound, RateLimited
from serving.evaluations import parse_evaluations
from serving.feedback_tokens import PREFIX, Grant, read_token
from serving.keys import sent_secret
from serving.requests import USER_LENGTH
from serving.votes import parse_batch, parse_vote

if TYPE_CHECKING:
    from serving.gateway import Gateway


_MOST_FOR_A_TOKEN = 4


class FeedbackEndpoints:
    """What FastAPI calls; each returns a response or raises ApiError.

    A request counts against the limits of its key from its headers on. Of the requests that come with one feedback
    token few are let in at once: whoever holds one is nobody we know.
    """

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        self._with_token: Counter[str] = Counter()

    async def vote(self, request: Request, response_id: str) -> Response:
        """POST /v1/feedback: one vote."""
        async with self._admitted(request) as (grant, headers):
            vote = parse_vote(await self._gateway.body(request), grant, request.headers.get("idempotency-key"))
            accepted = await self._gateway.desk.accept(vote, grant)
        return JSONResponse(accepted, status_code=202, headers=headers | {"x-flywheel-response-id": response_id})

    async def batch(self, request: Request, response_id: str) -> Response:
        """POST /v1/feedback/batch: 202 when all votes were accepted, else 207; the body tells each one's fate."""
        async with self._admitted(request) as (grant, headers):
            votes = parse_batch(await self._gateway.body(request), grant, request.headers.get("idempotency-key"))
            answer = await self._gateway.desk.accept_batch(votes, grant)
        status = 207 if answer["refused"] else 202
        return JSONResponse(answer, status_code=status, headers=headers | {"x-flywheel-response-id": response_id})

    async def evaluations(self, request: Request, response_id: str) -> Response:
        """POST /v1/logs: OTLP/HTTP log records, of which the evaluation events are votes."""
        async with self._admitted(request) as (grant, headers):
            found = parse_evaluations(
                await self._gateway.body(request),
                content_type=request.headers.get("content-type", ""),
                content_encoding=request.headers.get("content-encoding", ""),
                grant=grant,
                max_bytes=self._gateway.settings.max_body_bytes,
            )
            found.refused += await self._gateway.desk.accept_all(found.votes, grant)
        headers |= {"x-flywheel-response-id": response_id}
        return Response(found.answer(), media_type=found.media_type, headers=headers)

    async def votes_on(self, request: Request, response_id: str) -> Response:
        """GET /v1/responses/{name}/feedback: the stored votes that came with the same key."""
        key = await self._gateway.authorize(request, "feedback")
        name = request.path_params["name"]
        if not is_response_id(name):
            raise NotFound("No answer has such an id.", param="response_id", code="response_not_found")
        votes = await self._gateway.votes.votes_on(name, key.key_id)
        return JSONResponse({"object": "list", "data": votes}, headers={"x-flywheel-response-id": response_id})

    async def erase(self, request: Request, response_id: str) -> Response:
        """DELETE /v1/subjects/{name}: erase the answers made for that user, and the votes of that rater."""
        await self._gateway.authorize(request, "admin")
        erased = await self._gateway.votes.erase(request.path_params["name"][:USER_LENGTH])
        return JSONResponse({"object": "erasure", **erased}, headers={"x-flywheel-response-id": response_id})

    @asynccontextmanager
    async def _admitted(self, request: Request) -> AsyncIterator[tuple[Grant, dict[str, str]]]:
        """What the caller may vote on, and headers for the answer. A key with the scope may vote on everything."""
        grant = await self._grant(request)
        token = grant.target or ""
        if token and self._with_token[token] >= _MOST_FOR_A_TOKEN:
            raise RateLimited("Too many requests with this feedback token are under way.", retry_after_s=1)
        admission = self._gateway.limits.admit(grant.key)
        self._with_token[token] += 1
        try:
            yield grant, dict(admission.headers)
        finally:
            self._with_token[token] -= 1
            if not self._with_token[token]:
                del self._with_token[token]
            admission.end()

    async def _grant(self, request: Request) -> Grant:
        """What the caller may vote on: a feedback token names one thing, a key with the scope may all."""
        secret = sent_secret(request.headers.get("authorization"), request.headers.get("x-api-key"))
        if secret.startswith(PREFIX):
            table = self._gateway.router.table
            return read_token(secret, table.keys, table.digests)
        return Grant(await self._gateway.authorize(request, "feedback"))
