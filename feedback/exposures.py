"""What experiments showed to whom: the narrow rows that a report reads.

An answer is an exposure when an experiment drew its arm for a unit and the first of it was sent. Guarantee: the row is
written in the transaction that stores the answer and goes with it when that is erased, so both are there or neither.
"""

from collections.abc import Sequence

from feedback.events import AnyEvent, Interaction
from storage.postgres import Connection

_ADD = """
insert into exposures (experiment_id, response_id, unit, arm, propensity, fallback, exposed_at, status,
    completion_tokens, time_to_first_token_s, duration_s, tags)
select experiment_id, response_id, unit, arm, propensity, fallback, exposed_at, status,
    least(completion_tokens, 2147483647), time_to_first_token_s, duration_s, nullif(tags, '{}')
from interactions
where event_id = any (%s)
on conflict (response_id) do nothing
"""


def is_exposure(event: AnyEvent) -> bool:
    """Whether it shows a unit what an experiment drew for it."""
    return (
        isinstance(event, Interaction)
        and None not in (event.experiment_id, event.unit, event.arm, event.propensity, event.exposed_at)
        and event.comparison_id is None
        and event.shadow_of is None
    )


def add_exposures(connection: Connection, events: Sequence[AnyEvent]) -> None:
    """Add the rows of those of the events that are exposures and are stored; harmless when they are there."""
    ids = [event.event_id for event in events if is_exposure(event)]
    if ids:
        connection.execute(_ADD, (ids,))
