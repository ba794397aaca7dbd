"""Apache Kafka for tests: KRaft nodes on loopback, real processes that can be killed.

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
    """One node. It keeps its data, under `folder`, when it is killed. cluster: the one that it belongs to."""

    folder: Path = field(kw_only=True)
    controller: int = field(default_factory=free_port, kw_only=True)
    number: int = field(default=1, kw_only=True)
    cluster: "KafkaCluster | None" = field(default=None, kw_only=True)
    _formatted: bool = False

    def start(self) -> "Kafka":
        self.launch()
        assert self.process is not None
        wait_until_up(self.process, self.serves)
        return self

    def launch(self) -> None:
        """Start it and do not wait."""
        if not self._formatted:
            self._format()
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*_java("-Xmx384m"), "kafka.Kafka", str(self.folder / "properties")], stdout=log, stderr=log
            )

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

    def serves(self) -> bool:
        """Whether it answers as a broker."""
        if not listens("127.0.0.1", self.port):
            return False
        try:
            KafkaAdminClient(bootstrap_servers=f"127.0.0.1:{self.port}", request_timeout_ms=5_000).close()
        except KafkaError:
            return False
        return True

    def _format(self) -> None:
        nodes = [self] if self.cluster is None else self.cluster.nodes
        (self.folder / "properties").write_text(
            f"""
process.roles=broker,controller
node.id={self.number}
controller.quorum.voters={",".join(f"{node.number}@127.0.0.1:{node.controller}" for node in nodes)}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self.controller}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={self.folder / "data"}
offsets.topic.replication.factor={len(nodes)}
offsets.topic.num.partitions=1
transaction.state.log.replication.factor={len(nodes)}
transaction.state.log.min.isr={min(2, len(nodes))}
min.insync.replicas={min(2, len(nodes))}
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
"""
        )
        cluster_id = _new_cluster_id() if self.cluster is None else self.cluster.cluster_id
        arguments = ["format", "--cluster-id", cluster_id, "--config", str(self.folder / "properties")]
        subprocess.run([*_tool(), *arguments], capture_output=True, timeout=_TOOL_WITHIN_S, check=True)
        self._formatted = True


@dataclass
class KafkaCluster:
    """Three nodes, each topic on all of them; a record is acknowledged once two have it."""

    folder: Path
    cluster_id: str = ""
    nodes: list[Kafka] = field(default_factory=list)

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(node.bootstrap_servers for node in self.nodes)

    def start(self) -> "KafkaCluster":
        self.cluster_id = _new_cluster_id()
        for number in (1, 2, 3):
            folder = self.folder / f"node-{number}"
            folder.mkdir()
            self.nodes.append(Kafka(folder=folder, number=number, cluster=self))
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            assert node.process is not None
            wait_until_up(node.process, node.serves)
        return self

    def kill(self) -> None:
        """All of them."""
        for node in self.nodes:
            node.kill()


def _new_cluster_id() -> str:
    made = subprocess.run([*_tool(), "random-uuid"], capture_output=True, text=True, timeout=_TOOL_WITHIN_S, check=True)
    return made.stdout.strip()


def _tool() -> list[str]:
    return [*_java("-Xmx128m"), "kafka.tools.StorageTool"]


def _java(memory: str) -> list[str]:
    home = kafka_home()
    settings = next(iter([*home.glob("log4j2.*"), *home.glob("config/log4j2.*")]), None)
    logging = [] if settings is None else [f"-Dlog4j2.configurationFile={settings}"]
    return ["java", memory, "-cp", f"{home / 'libs'}/*", *logging]
