"""Rounds, their transitions and the controller's lease in PostgreSQL.

Guarantees: a transition, the context it hands on and its report are one transaction; a transition is
written only while the writer holds the lease and only from the state that it read, so two controllers
can't both move a round. Times are the database's own.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from feedback.events import uuid7
from rounds.errors import LeaseLost
from rounds.states import FIRST, TERMINAL, check_move
from storage.postgres import Connection, storable_json, storable_text

LEASE = "controller"


@dataclass(frozen=True)
class Round:
    """One turn of the wheel. `context` holds what the steps so far hand on."""

    round_id: str
    number: int
    state: str
    context: dict[str, Any] = field(default_factory=dict)
    created_at: datetime | None = None
    updated_at: datetime | None = None


def take_lease(connection: Connection, holder: str, seconds: float) -> bool:
    """Take or renew the lease for `seconds`; False while somebody else's is alive. Commits."""
    row = connection.execute(
        """
        insert into controller_lease (name, holder, expires_at)
        values (%(name)s, %(holder)s, now() + make_interval(secs => %(seconds)s))
        on conflict (name) do update set holder = excluded.holder, expires_at = excluded.expires_at
        where controller_lease.holder = excluded.holder or controller_lease.expires_at < now()
        returning holder
        """,
        {"name": LEASE, "holder": holder, "seconds": seconds},
    ).fetchone()
    connection.commit()
    return row is not None


def release_lease(connection: Connection, holder: str) -> None:
    """Give the lease back, so that the next controller need not wait for it to expire. Commits."""
    connection.execute("delete from controller_lease where name = %s and holder = %s", (LEASE, holder))
    connection.commit()


def current_round(connection: Connection) -> Round:
    """The round that is under way; a new one in the first state when the last has ended. Commits."""
    latest = _latest(connection)
    if latest is None or latest.state in TERMINAL:
        number = 1 if latest is None else latest.number + 1
        connection.execute(
            "insert into rounds (round_id, number, state) values (%s, %s, %s) on conflict (number) do nothing",
            (str(uuid7()), number, FIRST),
        )
        latest = _latest(connection)
    connection.commit()
    assert latest is not None
    return latest


def advance(
    connection: Connection,
    holder: str,
    round_: Round,
    to_state: str,
    *,
    reason: str,
    report: dict[str, Any],
    context: dict[str, Any],
) -> Round:
    """Move the round on and add `context` to its own. Commits.

    Raises ForbiddenMove for a move that the table does not have, LeaseLost when another controller holds
    the lease or has moved the round since it was read.
    """
    check_move(round_.state, to_state)
    with connection.transaction():
        held = connection.execute(
            "select 1 from controller_lease where name = %s and holder = %s and expires_at >= now() for update",
            (LEASE, holder),
        ).fetchone()
        moved = connection.execute(
            """
            update rounds set state = %s, context = context || %s::jsonb, updated_at = now()
            where round_id = %s and state = %s
            returning *
            """,
            (to_state, storable_json(context, unknown_as_null=True), round_.round_id, round_.state),
        ).fetchone()
        if held is None or moved is None:
            raise LeaseLost(f"another controller took over while round {round_.number} was in {round_.state}")
        connection.execute(
            """
            insert into round_transitions (round_id, ordinal, from_state, to_state, reason, report)
            select %(round)s, count(*) + 1, %(from)s, %(to)s, %(reason)s, %(report)s::jsonb
            from round_transitions where round_id = %(round)s
            """,
            {
                "round": round_.round_id,
                "from": round_.state,
                "to": to_state,
                "reason": storable_text(reason),
                "report": storable_json(report, unknown_as_null=True),
            },
        )
    return _round(moved)


def count_failure(connection: Connection, round_: Round) -> int:
    """Note that the work of the round's present state failed; returns how often it has by now. Commits."""
    row = connection.execute(
        """
        update rounds set context = jsonb_set(context, array[%(key)s],
            to_jsonb(coalesce((context->>%(key)s)::int, 0) + 1))
        where round_id = %(round)s returning (context->>%(key)s)::int as attempts
        """,
        {"key": f"{round_.state}_failures", "round": round_.round_id},
    ).fetchone()
    connection.commit()
    return int(row["attempts"]) if row else 0


def list_rounds(connection: Connection) -> list[Round]:
    """All rounds, the newest first."""
    return [_round(row) for row in connection.execute("select * from rounds order by number desc").fetchall()]


def transitions(connection: Connection, round_id: str) -> list[dict[str, Any]]:
    """The round's transitions in order: from_state, to_state, reason, report, moved_at."""
    return connection.execute(
        "select * from round_transitions where round_id = %s order by ordinal", (round_id,)
    ).fetchall()


def _latest(connection: Connection) -> Round | None:
    row = connection.execute("select * from rounds order by number desc limit 1").fetchone()
    return None if row is None else _round(row)


def _round(row: dict[str, Any]) -> Round:
    return Round(**{name: row[name] for name in Round.__dataclass_fields__})
