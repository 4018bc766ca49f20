"""What the whole suite shares: the real demo base."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_base() -> Path:
    """The demo base's folder, fetched and converted once into the user's cache."""
    from heddle.core.checkpoint.demo import demo_base

    return demo_base()
