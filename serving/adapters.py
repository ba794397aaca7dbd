"""What an engine replica should serve, and the loop that brings it there.

The registry is the desired state: every active adapter on this replica's base is loaded under its
checkpoint id and proven by its canaries; retired ones are unloaded. Each (checkpoint, replica) is tried
once: its id never gets other content, so a refusal stands until a new replica tries again.
Guarantees: nothing is marked proven that did not pass; the heartbeat begins with `run`, so a caller that
awaits `reconcile` first is not counted before it has tried every active adapter; it ends with the engine, so
gateways send nothing to a dead one. Database trouble delays the loop and stops nothing.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from psycopg.types.json import Jsonb

from serving.canary import CanaryReport, judge_canaries, read_canaries
from serving.database import HeldConnection
from serving.errors import CanariesUnreadable, EngineRefused
from serving.registry import Checkpoint, list_checkpoints
from serving.settings import CanaryTolerance
from storage.errors import DatabaseUnreachable
from storage.postgres import Connection

log = logging.getLogger(__name__)

CanaryVerdict = tuple[bool, dict[str, object]]


class AdapterEngine(Protocol):
    """The part of an engine that reconciliation needs. alive: false once it can't answer any more."""

    alive: bool

    async def load_adapter(self, checkpoint_id: str, path: str) -> None:
        """Load a LoRA adapter. Raises EngineRefused."""

    async def unload_adapter(self, checkpoint_id: str) -> None:
        """Forget an adapter; harmless when it is not loaded."""

    async def log_probabilities(self, token_ids: list[list[int]], checkpoint_id: str | None) -> list[list[float]]:
        """Log-probability of each token after the first; checkpoint_id names a loaded adapter, None the base.

        Raises EngineRefused for sequences that the engine does not take.
        """


async def prove(
    engine: AdapterEngine, checkpoint: Checkpoint, adapter_id: str | None, tolerance: CanaryTolerance
) -> CanaryReport:
    """Run the checkpoint's canaries through the engine and judge them. Raises EngineRefused when they can't be run."""
    try:
        canaries = read_canaries(checkpoint.manifest)
    except CanariesUnreadable as error:
        raise EngineRefused(f"{checkpoint.checkpoint_id} can't be proven: {error}") from error
    parents = [canary.parent_log_probabilities for canary in canaries if canary.parent_log_probabilities is not None]
    if adapter_id is not None and len(parents) < len(canaries):
        raise EngineRefused(f"the manifest of {checkpoint.checkpoint_id} lacks its parent's log-probabilities")
    references = [canary.log_probabilities for canary in canaries]
    try:
        served = await engine.log_probabilities([canary.token_ids for canary in canaries], adapter_id)
        return judge_canaries(references, served, None if adapter_id is None else parents, tolerance)
    except ValueError as error:
        raise EngineRefused(f"the canaries of {checkpoint.checkpoint_id} can't be run: {error}") from error


class Reconciler:
    """Brings one engine replica to the registry's desired state, and tells the registry."""

    def __init__(
        self,
        engine: AdapterEngine,
        *,
        dsn: str,
        replica_id: str,
        base_checkpoint_id: str,
        tolerance: CanaryTolerance,
        unload_after_s: float,
    ) -> None:
        self._engine = engine
        self._database = HeldConnection(dsn)
        self._pulse = HeldConnection(dsn)
        self._replica_id = replica_id
        self._base_id = base_checkpoint_id
        self._tolerance = tolerance
        self._tried: dict[str, bool] = {}  # adapter id → loaded
        self._retired_at: dict[str, float] = {}  # monotonic seconds
        self._unload_after_s = unload_after_s
        self._unwritten: dict[str, CanaryVerdict] = {}  # proofs that the database has yet to hear of

    async def prove_base(self) -> CanaryReport:
        """Prove the base. Raises EngineRefused with the report's words when it fails."""
        wanted = {c.checkpoint_id: c for c in await asyncio.to_thread(self._read)}
        report = await prove(self._engine, wanted[self._base_id], None, self._tolerance)
        await asyncio.to_thread(self._write_proof, self._base_id, report.passed, report.model_dump())
        if not report.passed:
            raise EngineRefused(f"the engine does not serve {self._base_id}: {report.reason}")
        log.info("base %s proven: %s", self._base_id, report.reason)
        return report

    async def reconcile(self) -> None:
        """One pass: load and prove what is new, unload what was retired unload_after_s ago."""
        await self._write_proofs()
        for checkpoint in await asyncio.to_thread(self._read):
            if checkpoint.kind == "adapter" and checkpoint.base_id == self._base_id:
                await self._settle(checkpoint)

    async def run(self, interval_s: float) -> None:
        """Heartbeat and reconcile for ever, every interval_s seconds, side by side: a load may take long."""
        await asyncio.gather(
            _for_ever(self.reconcile, interval_s),
            _for_ever(lambda: asyncio.to_thread(self._heartbeat), interval_s),
        )

    def leave(self) -> None:
        """Take this replica out of the list of live ones. Call after `run` has ended."""
        self._pulse.run(self._withdraw)
        self._pulse.close()
        self._database.close()

    async def _settle(self, checkpoint: Checkpoint) -> None:
        checkpoint_id = checkpoint.checkpoint_id
        if checkpoint.state == "retired":
            if not self._tried.get(checkpoint_id, False):
                return
            # Gateways read the registry in their own time and may still send requests for it.
            if time.monotonic() - self._retired_at.setdefault(checkpoint_id, time.monotonic()) >= self._unload_after_s:
                del self._tried[checkpoint_id], self._retired_at[checkpoint_id]
                await self._engine.unload_adapter(checkpoint_id)
                log.info("adapter %s unloaded: it was retired", checkpoint_id)
            return
        if checkpoint_id in self._tried:
            return
        try:
            await self._engine.load_adapter(checkpoint_id, checkpoint.path)
            report = await prove(self._engine, checkpoint, checkpoint_id, self._tolerance)
            passed, proof = report.passed, report.model_dump()
        except EngineRefused as error:
            passed, proof = False, {"passed": False, "reason": str(error)}
        self._tried[checkpoint_id] = passed
        if not passed:
            await self._engine.unload_adapter(checkpoint_id)
        self._unwritten[checkpoint_id] = (passed, proof)
        await self._write_proofs()
        log.info("adapter %s %s: %s", checkpoint_id, "proven" if passed else "refused", proof["reason"])

    async def _write_proofs(self) -> None:
        for checkpoint_id, (passed, proof) in list(self._unwritten.items()):
            await asyncio.to_thread(self._write_proof, checkpoint_id, passed, proof)
            del self._unwritten[checkpoint_id]

    def _read(self) -> list[Checkpoint]:
        return self._database.run(list_checkpoints)

    def _write_proof(self, checkpoint_id: str, passed: bool, proof: dict[str, object]) -> None:
        def write(connection: Connection) -> None:
            connection.execute(
                "insert into checkpoint_replicas (checkpoint_id, replica_id, status, proof) values (%s, %s, %s, %s) "
                "on conflict (checkpoint_id, replica_id) do update "
                "set status = excluded.status, proof = excluded.proof, proven_at = now()",
                (checkpoint_id, self._replica_id, "proven" if passed else "refused", Jsonb(proof)),
            )

        self._database.run(write)

    def _heartbeat(self) -> None:
        self._pulse.run(self._announce if self._engine.alive else self._withdraw)

    def _announce(self, connection: Connection) -> None:
        connection.execute(
            "insert into engine_replicas (replica_id, base_checkpoint_id) values (%s, %s) "
            "on conflict (replica_id) do update set heartbeat_at = now()",
            (self._replica_id, self._base_id),
        )

    def _withdraw(self, connection: Connection) -> None:
        connection.execute("delete from engine_replicas where replica_id = %s", (self._replica_id,))


async def _for_ever(work: Callable[[], Awaitable[None]], interval_s: float) -> None:
    while True:
        try:
            await work()
        except DatabaseUnreachable as error:
            log.warning("the registry can't be reached, the engine goes on as it is: %s", error)
        await asyncio.sleep(interval_s)
