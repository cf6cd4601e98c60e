"""The bundled model in three real services: what `make up` gives a user, in float32 so that texts must be equal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stack import Stack


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The bundled target and the bundled draft, with n-grams beside."""
    with Stack(
        folder=tmp_path_factory.mktemp("bundled"),
        target_model="bundled",
        draft_model="bundled-draft",
    ) as running:
        yield running
