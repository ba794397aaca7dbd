"""Apache Kafka for tests: one KRaft node on loopback, a real process that can be killed.

From the folder that FLYWHEEL_KAFKA_HOME names (an unpacked Kafka: its jars are in `libs`), with Java 17 or later.
"""

import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka.errors import KafkaError, UnknownTopicOrPartitionError

from flywheel.embedded import listens
from tests.helpers.servers import ROOT, START_WITHIN_S, Broker, free_port, wait_until_up

_TOOL_WITHIN_S = 180
_SHARED = ROOT.parent / "shared" / "kafka"


def kafka_home() -> Path:
    """Where Kafka is. Skips the test when there is none, or no Java."""
    home = Path(os.environ.get("FLYWHEEL_KAFKA_HOME", _SHARED))
    if not (home / "libs").is_dir():
        pytest.skip("no Apache Kafka: let FLYWHEEL_KAFKA_HOME name an unpacked one")
    if shutil.which("java") is None:
        pytest.skip("no Java to run Apache Kafka with")
    return home


@dataclass
class Kafka(Broker):
    """One node. It keeps its data, under `folder`, when it is killed."""

    folder: Path = field(kw_only=True)
    _formatted: bool = False

    def start(self) -> "Kafka":
        if not self._formatted:
            self._format()
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*_java("-Xmx384m"), "kafka.Kafka", str(self.folder / "properties")], stdout=log, stderr=log
            )
        wait_until_up(self.process, self._serves)
        return self

    def restart_empty(self) -> None:
        """Delete every topic. Made again they are other logs, as after a restart of the embedded broker."""
        admin = KafkaAdminClient(bootstrap_servers=self.bootstrap_servers, request_timeout_ms=10_000)
        try:
            deadline = time.monotonic() + START_WITHIN_S
            while topics := [name for name in admin.list_topics() if not name.startswith("__")]:
                assert time.monotonic() < deadline, "the topics do not go"
                try:
                    admin.delete_topics(topics, timeout_ms=10_000)
                except UnknownTopicOrPartitionError:  # deleted a moment ago, and still listed
                    time.sleep(0.1)
        finally:
            admin.close()

    def _format(self) -> None:
        controller = free_port()
        (self.folder / "properties").write_text(
            f"""
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{controller}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={self.folder / "data"}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
"""
        )
        tool = [*_java("-Xmx128m"), "kafka.tools.StorageTool"]
        made = subprocess.run(
            [*tool, "random-uuid"], capture_output=True, text=True, timeout=_TOOL_WITHIN_S, check=True
        )
        arguments = ["format", "--cluster-id", made.stdout.strip(), "--config", str(self.folder / "properties")]
        subprocess.run([*tool, *arguments], capture_output=True, timeout=_TOOL_WITHIN_S, check=True)
        self._formatted = True

    def _serves(self) -> bool:
        if not listens("127.0.0.1", self.port):
            return False
        try:
            KafkaAdminClient(bootstrap_servers=self.bootstrap_servers, request_timeout_ms=5_000).close()
        except KafkaError:
            return False
        return True


def _java(memory: str) -> list[str]:
    home = kafka_home()
    settings = next(iter([*home.glob("log4j2.*"), *home.glob("config/log4j2.*")]), None)
    logging = [] if settings is None else [f"-Dlog4j2.configurationFile={settings}"]
    return ["java", memory, "-cp", f"{home / 'libs'}/*", *logging]
