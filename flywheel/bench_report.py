"""`flywheel bench report`: how long the report of a large experiment takes, from the store to the last plot."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flywheel.experiment_page import write_page
from flywheel.handle import Platform
from flywheel.setup import migrate_database
from rounds.experiment_report import make_report
from serving.experiment_plan import candidate_start
from serving.experiments import start_experiment
from serving.registry import Checkpoint, register_checkpoint
from storage.postgres import Connection, connect

_TIMES = 5


def run(*, exposures: int, votes: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Fill a PostgreSQL of its own, make the report several times; medians in seconds. Raises StartFailed."""
    with tempfile.TemporaryDirectory(prefix="fwb") as folder, Platform(Path(folder) / "home") as platform:
        say("starting PostgreSQL")
        platform.start("postgres")
        migrate_database(platform.settings)
        say(f"filling the store with {exposures} exposures and {votes} votes")
        with connect(platform.dsn, autocommit=True) as connection:
            experiment_id = fill(connection, exposures, votes)
        with connect(platform.dsn) as connection:
            made, written = [], []
            for number in range(_TIMES):
                say(f"report {number + 1} of {_TIMES}")
                began = time.perf_counter()
                report = make_report(connection, experiment_id)
                made.append(time.perf_counter() - began)
                write_page(report, Path(folder) / "report.html")
                written.append(time.perf_counter() - began)
                connection.rollback()
            size = (Path(folder) / "report.html").stat().st_size
    return {
        "exposures": sum(arm["units"] for arm in report["arms"]),
        "votes": report["compared"][0]["effect"]["votes"],
        "report_s": round(statistics.median(made), 3),
        "report_and_page_s": round(statistics.median(written), 3),
        "slowest_s": round(max(written), 3),
        "page_kib": size // 1024,
        "sentence": report["sentence"],
    }


def fill(connection: Connection, exposures: int, votes: int) -> str:
    """Store an A/B test on thumbs: one answer for each unit, of which so many are voted on. Returns the experiment's
    id.
    """
    for name, kind, parent in (("base", "model", None), ("candidate", "adapter", "base")):
        register_checkpoint(
            connection,
            Checkpoint(checkpoint_id=name, kind=kind, parent_id=parent, digest=name, path="/nowhere", manifest={}),
        )
    connection.execute("insert into aliases (alias, checkpoint_id) values ('flash', 'base')")
    started = start_experiment(connection, candidate_start("flash", "base", "candidate", 0.5, metric="thumb"))
    numbers = {"experiment": started.experiment_id, "exposures": exposures, "votes": votes}
    for statement in _FILL:
        connection.execute(statement, numbers)
    return started.experiment_id


_FILL = (
    "select setseed(0.5)",
    "update experiments set started_at = now() - make_interval(secs => 60 + %(exposures)s * 0.001)",
    """
    insert into interactions (event_id, "time", api_key_id, response_id, endpoint, checkpoint_id, alias, pinned,
        experiment_id, arm, unit, propensity, exposed_at, "user", tags, content_kept, prompt_hash, messages, parameters,
        text, finish_reason, status, prompt_tokens, completion_tokens, time_to_first_token_s, duration_s, overhead_s)
    select 'event-' || n, now() - make_interval(secs => (%(exposures)s - n) * 0.001), 'key',
        'chatcmpl-' || lpad(to_hex(n), 32, '0'), '/v1/chat/completions',
        case when candidate then 'candidate' else 'base' end, 'flash', false, %(experiment)s,
        case when candidate then 'candidate' else 'control' end, 'user-' || n, 0.5,
        now() - make_interval(secs => (%(exposures)s - n) * 0.001), 'user-' || n,
        jsonb_build_object('language', (array['en', 'de', 'fr'])[1 + n %% 3]), true, md5(n::text),
        '[{"role": "user", "content": "What is the capital of France?"}]', '{}',
        'The capital of France is Paris.', 'stop', case when n %% 200 = 0 then 'client_abort' else 'completed' end,
        12, 20 + n %% 40, exp(-2 + random()), 1.0, 0.002
    from (select n, random() < 0.5 as candidate from generate_series(1, %(exposures)s) as n) as drawn
    """,
    """
    insert into exposures (experiment_id, response_id, unit, arm, propensity, fallback, exposed_at, status,
        completion_tokens, time_to_first_token_s, duration_s, tags)
    select experiment_id, response_id, unit, arm, propensity, fallback, exposed_at, status, completion_tokens,
        time_to_first_token_s, duration_s, tags
    from interactions
    """,
    """
    insert into feedback (event_id, "time", api_key_id, kind, rater, source, tags, response_id, value)
    select 'vote-' || response_id, exposed_at + interval '1 second', 'key', 'thumb', unit, 'human', '{}', response_id,
        case when random() < case arm when 'candidate' then 0.62 else 0.6 end then 'up' else 'down' end
    from exposures
    where response_id in (
        select 'chatcmpl-' || lpad(to_hex(n * (%(exposures)s / %(votes)s)), 32, '0') from generate_series(1,
    %(votes)s) n )
    """,
    "vacuum analyze interactions",
    "vacuum analyze exposures",
    "vacuum analyze feedback",
)
