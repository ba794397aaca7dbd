"""What many tests share: the prepared base model and real servers. Helpers are modules under tests/helpers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.kafka import Kafka, kafka_home
from tests.helpers.servers import Broker, Postgres


@pytest.fixture(scope="session")
def base_model() -> Path:
    """The prepared base model in the checkout's own home, made once (about half a minute)."""
    from flywheel.model import prepare_base_model
    from flywheel.settings import load_settings

    settings = load_settings()
    return prepare_base_model(settings, lambda text: None)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """A real PostgreSQL; take a database of your own from it with `new_database()`."""
    server = Postgres(tmp_path_factory.mktemp("postgres")).start()
    yield server
    server.stop()


@pytest.fixture
def dsn(postgres: Postgres) -> str:
    """A fresh, migrated database."""
    return postgres.new_database()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """Apache Kafka, one node for all tests."""
    kafka_home()
    server = Kafka(folder=tmp_path_factory.mktemp("kafka")).start()
    yield server
    server.kill()


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A real broker without topics, to be killed at will: each test runs on the embedded one and on Apache Kafka."""
    if request.param == "kafka":
        server: Kafka = request.getfixturevalue("kafka")
        server.restart_empty()
        yield server
        if server.process is None:
            server.start()
        return
    embedded = Broker().start()
    yield embedded
    embedded.kill()


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long, and with which faults, tests/faults/test_ledger_history.py tries the ledger."""
    parser.addoption("--ledger-seconds", type=float, default=40.0, help="how long the ledger is tried with faults")
    parser.addoption("--ledger-seed", type=int, default=7, help="which random faults the ledger is tried with")
