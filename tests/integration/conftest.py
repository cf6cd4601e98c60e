"""Three real services on tiny random models. One stack serves all modules: starting one takes about 10 seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stack import Stack
from tests.tiny_models import write_draft, write_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="session")
def draft_folder(target_folder: Path) -> Callable[[float], Path]:
    """A draft of the target, by its noise."""

    def make(noise: float) -> Path:
        folder = target_folder.parent / f"draft-{noise}"
        return folder if folder.exists() else write_draft(target_folder, folder, noise=noise)

    return make


@pytest.fixture(scope="session")
def stack(
    tmp_path_factory: pytest.TempPathFactory, target_folder: Path, draft_folder: Callable[[float], Path]
) -> Iterator[Stack]:
    """Target, a middling model draft (with n-grams beside it), gateway. Who stops one of them starts it again."""
    with Stack(
        folder=tmp_path_factory.mktemp("stack"),
        target_model=str(target_folder),
        draft_model=str(draft_folder(0.05)),
        settings={"TANDEM_DRAFT_LAW_SIZE": "300"},
    ) as running:
        yield running
