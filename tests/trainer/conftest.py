"""Fixtures for the trainer's tests."""

import pytest


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than these runs."""
    monkeypatch.setattr("trainer.metrics.draw_curves", lambda *args: None)
