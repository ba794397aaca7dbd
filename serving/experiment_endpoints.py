"""The endpoints about experiments: start, look, ramp, stop, report. All need the scope `evaluate`."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serving.errors import InvalidRequest
from serving.experiment_plan import Experiment, Start, State
from serving.requests import parse_model

if TYPE_CHECKING:
    from serving.gateway import Gateway

_STATES: tuple[State, ...] = ("running", "promoted", "rejected", "stopped")


class Ramp(BaseModel):
    """New weights for all arms, by name, or a new share of the alias's units."""

    model_config = ConfigDict(extra="forbid")

    weights: dict[str, float] | None = None
    share: float | None = Field(default=None, ge=0, le=1)


class Stop(BaseModel):
    """Why it ends."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(default="stopped through the API", max_length=1000)


class Experiments(Protocol):
    """The part of serving.experiment_store.ExperimentStore that the endpoints use. Each may raise ApiError."""

    async def start(self, start: Start) -> Experiment: ...

    async def ramp(self, experiment_id: str, weights: dict[str, float] | None, share: float | None) -> Experiment: ...

    async def stop(self, experiment_id: str, reason: str) -> Experiment: ...

    async def get(self, experiment_id: str) -> Experiment: ...

    async def changes(self, experiment_id: str) -> list[dict[str, Any]]: ...

    async def report(self, experiment_id: str) -> dict[str, Any]: ...

    async def list(self, alias: str | None, state: State | None) -> list[Experiment]: ...


class ExperimentEndpoints:
    """What FastAPI calls; each returns a response or raises ApiError."""

    def __init__(self, gateway: "Gateway", experiments: Experiments) -> None:
        self._gateway = gateway
        self._experiments = experiments

    def routes(self) -> list[tuple[str, str, Callable[[Request, str], Awaitable[Response]]]]:
        """(path, method, handler) of each."""
        one = "/v1/experiments/{name}"
        return [
            ("/v1/experiments", "POST", self.start),
            ("/v1/experiments", "GET", self.list),
            (one, "GET", self.get),
            (f"{one}/ramp", "POST", self.ramp),
            (f"{one}/stop", "POST", self.stop),
            (f"{one}/report", "GET", self.report),
        ]

    async def start(self, request: Request, response_id: str) -> Response:
        """POST /v1/experiments: 201 and the experiment, which gateways follow within a second."""
        await self._gateway.authorize(request, "evaluate")
        started = await self._experiments.start(parse_model(await self._gateway.body(request), Start))
        return _answer(_shown(started), response_id, 201)

    async def list(self, request: Request, response_id: str) -> Response:
        """GET /v1/experiments: all, oldest first; `?alias=` and `?state=` narrow them down."""
        await self._gateway.authorize(request, "evaluate")
        asked = request.query_params.get("state")
        state = next((known for known in _STATES if known == asked), None)
        if asked is not None and state is None:
            raise InvalidRequest(f"`state` must be one of {', '.join(_STATES)}.", param="state")
        found = await self._experiments.list(request.query_params.get("alias"), state)
        return _answer({"object": "list", "data": [_shown(one) for one in found]}, response_id)

    async def get(self, request: Request, response_id: str) -> Response:
        """GET /v1/experiments/{name}: the experiment and what was done to it."""
        await self._gateway.authorize(request, "evaluate")
        name = request.path_params["name"]
        found = await self._experiments.get(name)
        rows = await self._experiments.changes(name)
        changes = [{**row, "changed_at": row["changed_at"].isoformat()} for row in rows]
        return _answer({**_shown(found), "changes": changes}, response_id)

    async def ramp(self, request: Request, response_id: str) -> Response:
        """POST /v1/experiments/{name}/ramp: other weights, or another share."""
        await self._gateway.authorize(request, "evaluate")
        asked = parse_model(await self._gateway.body(request), Ramp)
        if asked.weights is None and asked.share is None:
            raise InvalidRequest("Send `weights`, `share`, or both.", param="weights")
        ramped = await self._experiments.ramp(request.path_params["name"], asked.weights, asked.share)
        return _answer(_shown(ramped), response_id)

    async def stop(self, request: Request, response_id: str) -> Response:
        """POST /v1/experiments/{name}/stop: the alias's own checkpoint answers everybody again."""
        await self._gateway.authorize(request, "evaluate")
        body = await self._gateway.body(request)
        asked = parse_model(body, Stop) if body.strip() else Stop()
        return _answer(_shown(await self._experiments.stop(request.path_params["name"], asked.reason)), response_id)

    async def report(self, request: Request, response_id: str) -> Response:
        """GET /v1/experiments/{name}/report: what can be concluded now, as `flywheel experiment report` tells it."""
        await self._gateway.authorize(request, "evaluate")
        report = await self._experiments.report(request.path_params["name"])
        return _answer({"object": "experiment.report", **report}, response_id)


def _shown(experiment: Experiment) -> dict[str, Any]:
    """Without the salt, which tells who will be in which arm."""
    return {"object": "experiment", **experiment.model_dump(mode="json", exclude={"salt", "allocation"})}


def _answer(content: dict[str, Any], response_id: str, status: int = 200) -> Response:
    return JSONResponse(content, status_code=status, headers={"x-flywheel-response-id": response_id})
