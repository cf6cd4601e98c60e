"""A stack whose texts under a seed are equal without exception, by tests/steady_target. For tests of faults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.stack import Stack
from tests.tiny_models import write_draft, write_target

KV_BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 8  # of its target: layers, keys and values, heads, their size, float64


def steady_stack(folder: Path, *, settings: Mapping[str, str], **more: Any) -> Stack:
    """Not started yet. `more` goes to Stack."""
    target = write_target(folder / "target")
    draft = write_draft(target, folder / "draft", noise=0.03)
    return Stack(
        folder=folder,
        target_model=str(target),
        draft_model=str(draft),
        target_module="tests.steady_target",
        settings=settings,
        **more,
    )
