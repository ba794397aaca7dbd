"""Laws of the experiments' REST API, on a real PostgreSQL, and of the command line beside it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flywheel.cli import app
from rounds.reporter import Reporter
from serving.experiment_store import ExperimentStore
from serving.keys import ApiKey, digest_of
from storage.postgres import Connection, connect
from tests.helpers.experiments import crowd, register, start
from tests.helpers.ledger import insert
from tests.helpers.serving import SECRET, Bench, StillRouter, build_table, check_error

pytestmark = pytest.mark.real
ARMS = [
    {"name": "control", "checkpoint_id": "base", "weight": 0.5},
    {"name": "candidate", "checkpoint_id": "new", "weight": 0.5},
]


@pytest.fixture
def connection(dsn: str) -> Iterator[Connection]:
    with connect(dsn, autocommit=True) as opened:
        register(opened, "new", "third")
        for name in ("base", "new", "third"):  # proven by an engine that is alive
            opened.execute(
                "insert into engine_replicas (replica_id, base_checkpoint_id) values ('r', 'base') "
                "on conflict do nothing"
            )
            opened.execute(
                "insert into checkpoint_replicas (checkpoint_id, replica_id, status, proof) "
                "values (%s, 'r', 'proven', '{}')",
                (name,),
            )
        yield opened


@pytest.fixture
def bench(dsn: str, connection: Connection) -> Iterator[Bench]:
    store = ExperimentStore(dsn, 3600, report_timeout_s=15)
    yield Bench(experiments=store)
    store.close()


async def call(bench: Bench, method: str, path: str, body: Any = None) -> Any:
    async with bench.client() as client:
        return await client.request(method, f"/v1/experiments{path}", json=body)


async def an_experiment_is_started_ramped_reported_and_stopped(bench: Bench, dsn: str) -> None:
    answer = await call(bench, "POST", "", {"alias": "flash", "arms": ARMS, "metric": "thumb", "share": 0.5})
    assert answer.status_code == 201, answer.text
    started = answer.json()
    assert (started["object"], started["state"], started["share"]) == ("experiment", "running", 0.5)
    assert "salt" not in started
    name = started["experiment_id"]
    ramped = await call(bench, "POST", f"/{name}/ramp", {"weights": {"control": 0.2, "candidate": 0.8}, "share": 1})
    assert [arm["weight"] for arm in ramped.json()["arms"]] == [0.2, 0.8]
    listed = await call(bench, "GET", "?alias=flash&state=running")
    assert [one["experiment_id"] for one in listed.json()["data"]] == [name]
    reporter = Reporter(dsn)
    reporter.start()
    try:
        report = await call(bench, "GET", f"/{name}/report")
    finally:
        reporter.close()
    assert report.json()["object"] == "experiment.report"
    assert report.json()["sentence"]
    stopped = await call(bench, "POST", f"/{name}/stop")
    assert stopped.json()["state"] == "stopped"
    told = (await call(bench, "GET", f"/{name}")).json()
    assert [change["kind"] for change in told["changes"]] == ["started", "ramped", "stopped"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"alias": "flash"}, "arms"),
        ({"alias": "flash", "arms": ARMS[:1]}, "arms"),
        ({"alias": "flash", "arms": ARMS, "metric": "joy"}, "metric"),
        ({"alias": "flash", "arms": ARMS, "unit": "planet"}, "unit"),
        ({"alias": "flash", "arms": [ARMS[0], {**ARMS[1], "weight": 7}]}, "arms[1].weight"),
        ({"alias": "flash", "arms": ARMS, "guardrails": {"error_rate": -1}}, "guardrails.error_rate"),
        ({"alias": "flash", "arms": ARMS, "shadows": 1}, "shadows"),
    ],
)
async def a_wrong_start_names_its_field(body: dict[str, Any], param: str, bench: Bench) -> None:
    error = check_error(await call(bench, "POST", "", body), 400)
    assert error["param"] == param


async def a_start_that_can_not_be_is_refused_with_the_reason(bench: Bench) -> None:
    for arms in ([ARMS[0], ARMS[0]], [ARMS[0], {**ARMS[1], "weight": 0.1}]):
        check_error(await call(bench, "POST", "", {"alias": "flash", "arms": arms}), 400)
    unknown = [ARMS[0], {**ARMS[1], "checkpoint_id": "nobody"}]
    assert "nobody" in check_error(await call(bench, "POST", "", {"alias": "flash", "arms": unknown}), 400)["message"]
    assert (await call(bench, "POST", "", {"alias": "flash", "arms": ARMS})).status_code == 201
    assert "is free" in check_error(await call(bench, "POST", "", {"alias": "flash", "arms": ARMS}), 409)["message"]
    check_error(await call(bench, "GET", "?state=asleep"), 400)


async def an_unknown_experiment_is_a_404(bench: Bench) -> None:
    for method, path in (("GET", "/x"), ("POST", "/x/stop"), ("GET", "/x/report")):
        check_error(await call(bench, method, path), 404, "experiment_not_found")
    check_error(await call(bench, "POST", "/x/ramp", {"share": 0.5}), 404)
    check_error(await call(bench, "POST", "/x/ramp", {}), 400)


async def a_key_without_the_scope_may_not_even_look(bench: Bench) -> None:
    key = ApiKey("key-1", "test", frozenset({"inference", "feedback", "admin"}))
    bench.gateway.router = StillRouter(build_table(keys={digest_of(SECRET): key}))
    for method, path in (("GET", ""), ("POST", ""), ("GET", "/x"), ("POST", "/x/ramp"), ("GET", "/x/report")):
        check_error(await call(bench, method, path, {}), 403)


def run(dsn: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, [f"--set=storage.dsn={dsn}", "experiment", *arguments])


def the_command_line_does_the_same(connection: Connection, dsn: str, tmp_path: Path) -> None:
    connection.execute("update engine_replicas set heartbeat_at = now() + interval '1 hour'")
    began = run(
        dsn, "start", "new", "third", "--weight", "0.25", "--metric", "thumb", "--tester", "eve=candidate-1", "--json"
    )
    assert began.exit_code == 0, began.output
    started = json.loads(began.stdout)
    assert [(arm["name"], arm["weight"]) for arm in started["arms"]] == [
        ("control", 0.5),
        ("candidate-1", 0.25),
        ("candidate-2", 0.25),
    ]
    name = started["experiment_id"]
    ramped = run(
        dsn, "ramp", name, "--weight", "control=0.8", "--weight", "candidate-1=0.1", "--weight", "candidate-2=0.1"
    )
    assert "control 80%" in ramped.stdout
    assert name in run(dsn, "list", "--running").stdout
    report = run(dsn, "report", name, "--html", str(tmp_path / "page.html"), "--rows", str(tmp_path / "rows"), "--json")
    assert json.loads(report.stdout)["experiment_id"] == name
    assert (tmp_path / "page.html").stat().st_size > 1000
    assert {file.name for file in (tmp_path / "rows").iterdir()} == {
        "exposures.parquet",
        "votes.parquet",
        "choices.parquet",
    }
    assert json.loads(run(dsn, "stop", name, "--json").stdout)["state"] == "stopped"


def the_report_in_the_terminal_says_the_sentence(connection: Connection, dsn: str) -> None:
    experiment = start(connection, metric="thumb")
    insert(dsn, crowd(experiment, 600, 0.4, 0.8))
    shown = run(dsn, "report", experiment.experiment_id).stdout
    assert "Candidate is better than control" in " ".join(shown.split())
    assert "Guardrails" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ("start", "new", "--metric", "joy"),
        ("start", "new", "--weight", "1.5"),
        ("start", "new", "third", "--weight", "0.7"),
        ("start", "new", "--tester", "eve"),
        ("start", "new", "--tester", "eve=nobody"),
        ("start", "new", "--guardrail", "error_rate=much"),
        ("start", "new", "--guardrail", "joy=1"),
        ("ramp", "exp-none"),
        ("ramp", "exp-none", "--weight", "control=x"),
    ],
)
def bad_usage_ends_with_2(arguments: tuple[str, ...], connection: Connection, dsn: str) -> None:
    assert run(dsn, *arguments).exit_code == 2
