"""An experiment's raw rows as Parquet, for who wants to compute everything anew."""

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from serving.experiments import get_experiment
from storage.postgres import Connection

_BATCH = 50_000
_TIME = pa.timestamp("us", tz="UTC")
_TABLES: dict[str, tuple[str, pa.Schema]] = {
    "exposures": (
        """
        select unit, response_id, arm, propensity, fallback, exposed_at, status, completion_tokens,
            time_to_first_token_s, duration_s, tags::text as tags
        from exposures where experiment_id = %(experiment)s order by exposed_at, response_id
        """,
        pa.schema(
            [
                ("unit", pa.string()),
                ("response_id", pa.string()),
                ("arm", pa.string()),
                ("propensity", pa.float64()),
                ("fallback", pa.bool_()),
                ("exposed_at", _TIME),
                ("status", pa.string()),
                ("completion_tokens", pa.int32()),
                ("time_to_first_token_s", pa.float32()),
                ("duration_s", pa.float32()),
                ("tags", pa.string()),
            ]
        ),
    ),
    "votes": (
        """
        select shown.unit, vote.response_id, vote.event_id, vote."time" as voted_at, vote.rater, vote.source, vote.kind,
            vote.name, vote.value, vote.lowest, vote.highest
        from exposures shown join feedback vote on vote.response_id = shown.response_id
        where shown.experiment_id = %(experiment)s order by voted_at, event_id
        """,
        pa.schema(
            [
                ("unit", pa.string()),
                ("response_id", pa.string()),
                ("event_id", pa.string()),
                ("voted_at", _TIME),
                ("rater", pa.string()),
                ("source", pa.string()),
                ("kind", pa.string()),
                ("name", pa.string()),
                ("value", pa.string()),
                ("lowest", pa.float64()),
                ("highest", pa.float64()),
            ]
        ),
    ),
    "choices": (
        """
        select comparison_id, vote_id as event_id, voted_at, rater, source, verdict, prompt_hash, arm_a, arm_b,
        chosen_arm from comparison_votes where experiment_id = %(experiment)s order by voted_at, vote_id
        """,
        pa.schema(
            [
                ("comparison_id", pa.string()),
                ("event_id", pa.string()),
                ("voted_at", _TIME),
                ("rater", pa.string()),
                ("source", pa.string()),
                ("verdict", pa.string()),
                ("prompt_hash", pa.string()),
                ("arm_a", pa.string()),
                ("arm_b", pa.string()),
                ("chosen_arm", pa.string()),
            ]
        ),
    ),
}
_PEOPLE = ("unit", "rater")


def write_rows(connection: Connection, experiment_id: str, folder: Path) -> dict[str, int]:
    """Write exposures.parquet, votes.parquet and choices.parquet into `folder`; returns their rows by name.

    arm_a and arm_b wrote the answers shown first and second. People's names are replaced by digests that are the same
    in all three files and in no other experiment. Raises ExperimentUnknown.
    """
    experiment = get_experiment(connection, experiment_id)
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, (query, schema) in _TABLES.items():
        temporary = folder / f".{name}.parquet"
        counts[name] = 0
        with (
            connection.cursor(f"rows_{name}") as cursor,
            pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
        ):
            cursor.itersize = _BATCH
            cursor.execute(query, {"experiment": experiment_id})
            while rows := cursor.fetchmany(_BATCH):
                writer.write_table(pa.Table.from_pylist([_hidden(row, experiment.salt) for row in rows], schema))
                counts[name] += len(rows)
        temporary.replace(folder / f"{name}.parquet")
    return counts


def _hidden(row: dict[str, Any], salt: str) -> dict[str, Any]:
    digests = {
        name: hashlib.sha256(f"{salt}\n{row[name]}".encode("utf-8", "surrogatepass")).hexdigest()[:24]
        for name in _PEOPLE
        if row.get(name) is not None
    }
    return row | digests
