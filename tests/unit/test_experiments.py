"""Laws of the experiment's decision and of the round's state table."""

import random

import pytest

from rounds.errors import ForbiddenMove
from rounds.experiments import Outcome, Tally, decide, evidence_path
from rounds.settings import ExperimentSettings
from rounds.states import FIRST, MOVES, TERMINAL, check_move

SETTINGS = ExperimentSettings()


def votes(wins: int, losses: int, ties: int = 0) -> Tally:
    outcomes: list[Outcome] = ["win"] * wins + ["loss"] * losses + ["tie"] * ties
    return Tally(tuple(outcomes))


def a_clearly_better_candidate_is_promoted() -> None:
    decision = decide(votes(60, 20), SETTINGS)
    assert decision.state == "promoted"
    assert decision.numbers["win_share_low"] > 0.5


def a_clearly_worse_candidate_is_rejected() -> None:
    assert decide(votes(20, 60), SETTINGS).state == "rejected"


def a_handful_of_early_wins_decides_nothing() -> None:
    assert decide(votes(SETTINGS.minimum_votes - 1, 0), SETTINGS).state == "running"


def an_even_record_runs_until_the_votes_run_out_and_is_then_rejected() -> None:
    assert decide(votes(50, 50), SETTINGS).state == "running"
    half = SETTINGS.maximum_votes // 2
    last = decide(votes(half, half), SETTINGS)
    assert last.state == "rejected"
    assert "not proven better" in last.reason


def a_tie_moves_no_evidence() -> None:
    with_ties, without = decide(votes(30, 22, 40), SETTINGS), decide(votes(30, 22), SETTINGS)
    assert with_ties.numbers["log_evidence_better"] == without.numbers["log_evidence_better"]


def random_votes_promote_at_most_alpha_of_the_time() -> None:
    generator = random.Random(5)
    promoted = 0
    for _ in range(100):
        outcomes: list[Outcome] = []
        for _ in range(SETTINGS.maximum_votes // 20):
            outcomes += generator.choices(["win", "loss"], k=20)
            state = decide(Tally(tuple(outcomes)), SETTINGS).state
            if state != "running":
                promoted += state == "promoted"
                break
    assert promoted / 100 <= SETTINGS.alpha


def the_path_ends_where_the_decision_looks() -> None:
    tally = votes(40, 15, 5)
    last = evidence_path(tally.outcomes, SETTINGS.alpha)[-1]
    numbers = decide(tally, SETTINGS).numbers
    assert (last["low"], last["high"]) == (numbers["win_share_low"], numbers["win_share_high"])


def every_state_can_be_reached_and_every_way_ends() -> None:
    reached, frontier = {FIRST}, [FIRST]
    while frontier:
        for state in MOVES[frontier.pop()] - reached:
            reached.add(state)
            frontier.append(state)
    assert reached == set(MOVES)
    assert {"promoted", "rejected"} == TERMINAL
    assert all(TERMINAL & reachable(state) for state in MOVES)


def reachable(state: str) -> set[str]:
    return {state}.union(*(reachable(following) for following in MOVES[state]))


def a_move_that_the_table_does_not_have_is_refused() -> None:
    with pytest.raises(ForbiddenMove):
        check_move("collecting", "promoted")
    with pytest.raises(ForbiddenMove):
        check_move("promoted", "collecting")
