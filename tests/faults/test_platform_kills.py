"""SIGKILL of serving (gateway and outbox), relay, ingest and controller at random moments, while users vote.

The law: what was acknowledged is stored, once. Users retry with the same idempotency key, as a client would.
"""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from flywheel.handle import Platform
from flywheel.model import prepare_tiny_model
from flywheel.state import read_state
from loadtest.raters import prompts_for_votes
from loadtest.users import Acknowledged, Sampling, Users
from storage.postgres import connect

pytestmark = [pytest.mark.real, pytest.mark.engine]

VICTIMS = ("relay", "ingest", "controller", "relay", "ingest", "serving", "relay", "ingest", "controller")
PAUSE_S = (1.0, 4.0)
VOTES_AFTER_THE_LAST_KILL = 20


async def vote_while_processes_die(platform: Platform, seed: int) -> Acknowledged:
    generator = random.Random(seed)
    async with Users(
        platform.url, platform.key, taste="concise", seed=seed, concurrency=6, sampling=Sampling(max_tokens=12)
    ) as users:
        enough = 1_000_000
        voting = asyncio.create_task(
            users.collect_votes(prompts_for_votes(), 2000, done=lambda: len(users.acknowledged.feedback_ids) >= enough)
        )
        for victim in VICTIMS:
            await asyncio.sleep(generator.uniform(*PAUSE_S))
            state = read_state(platform.settings.home)
            pid = state.components[victim].pid if state else None
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        enough = len(users.acknowledged.feedback_ids) + VOTES_AFTER_THE_LAST_KILL
        async with asyncio.timeout(240):
            await voting
        return users.acknowledged


def what_was_acknowledged_is_stored_once_whoever_is_killed(tmp_path: Path) -> None:
    model = prepare_tiny_model(tmp_path / "tiny")
    with Platform(
        tmp_path / "home",
        f"serving.model={model}",
        "serving.max_model_len=512",
        "rounds.controller.new_preferences=100000",
    ) as platform:
        platform.start()
        acknowledged = asyncio.run(vote_while_processes_die(platform, seed=11))
        audit = platform.audit_when_drained()
        with connect(platform.dsn) as connection:
            feedback = [str(row["event_id"]) for row in connection.execute("select event_id from feedback").fetchall()]
            responses = [
                row["response_id"] for row in connection.execute("select response_id from interactions").fetchall()
            ]
    assert len(feedback) == len(set(feedback))
    assert len(responses) == len(set(responses))
    assert set(acknowledged.feedback_ids) <= set(feedback)
    assert set(acknowledged.response_ids) <= set(responses)
    assert audit["clean"], audit
    assert audit["pending"] == 0
