"""What many tests share: the prepared base model. Helpers are modules under tests/helpers."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def base_model() -> Path:
    """The prepared base model in the checkout's own home, made once (about half a minute)."""
    from flywheel.model import prepare_base_model
    from flywheel.settings import load_settings

    settings = load_settings()
    return prepare_base_model(settings, lambda text: None)
