"""Settings of the feedback room."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator


class FeedbackSettings(BaseModel):
    """The outbox, the log, and how the relay and the ingest go about their work. Times in seconds.

    bootstrap_servers: `host:port[,host:port]` of the Kafka cluster.
    embedded_broker: `flywheel up` starts a memory-only broker at that address.
    outbox: folder on a local disk (not a network file system) shared by the gateways and the relay of one node.
    outbox_max_pending: events of one process that may wait for the log before new ones are refused.
    outbox_max_queued: events that may wait for the disk before new ones are refused.
    outbox_retention_s: how long a sent event is kept, to send it again to a broker that lost its log,
        and to recognise a retry. An ingest that is down for longer, together with a broker that loses
        its log, loses events.
    retention_s: how long the store keeps an answer or a vote; 0: for ever. Not less than outbox_retention_s.
    erase_poll_s: how often the relay asks the store what was erased.
    partitions, replication_factor: of the topics this room creates; a topic that exists is left as it is.
    max_record_bytes: key, value and headers of the largest record sent to the log; a larger one is a dead letter.
    relay_batch, ingest_batch: records in flight, and records in one transaction.
    relay_poll_s: how long the relay, and ingest_pause_s: how long the ingest rests after a batch that was not large. A
        vote takes up to both longer to the store, and many votes cost less.
    log_check_s: how often an idle relay or ingest asks whether the log is still the same.
    request_timeout_s: for one answer of the broker. delivery_timeout_s: for one record's acknowledgement.
    backoff_max_s: the longest pause between tries while the broker or the database is away.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bootstrap_servers: str = "127.0.0.1:19092"
    embedded_broker: bool = True
    outbox: Path = Path(".flywheel/outbox")
    outbox_max_pending: int = Field(default=1_000_000, ge=1)
    outbox_max_queued: int = Field(default=10_000, ge=1)
    outbox_retention_s: float = Field(default=7 * 86400.0, gt=0)
    retention_s: float = Field(default=0.0, ge=0)
    erase_poll_s: float = Field(default=5.0, gt=0)
    partitions: int = Field(default=3, ge=1)
    replication_factor: int = Field(default=1, ge=1)
    max_record_bytes: int = Field(default=900_000, ge=1_000)
    relay_batch: int = Field(default=500, ge=1)
    relay_poll_s: float = Field(default=0.1, gt=0)
    ingest_pause_s: float = Field(default=0.1, ge=0)
    ingest_batch: int = Field(default=500, ge=1)
    ingest_group: str = "flywheel-ingest"
    log_check_s: float = Field(default=1.0, gt=0)
    request_timeout_s: float = Field(default=5.0, gt=0)
    delivery_timeout_s: float = Field(default=10.0, gt=0)
    backoff_max_s: float = Field(default=3.0, gt=0)

    @model_validator(mode="after")
    def _store_outlasts_the_outbox(self) -> "FeedbackSettings":
        if 0 < self.retention_s < self.outbox_retention_s:
            raise ValueError(
                f"retention_s ({self.retention_s:g}) must be 0 or at least outbox_retention_s "
                f"({self.outbox_retention_s:g}): what the outbox may send again would come back"
            )
        return self
