"""`tandem models`: what is here, and fetching what is not."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from tandem.cli.fetching import fetch_with_bar
from tandem.errors import Unavailable
from tandem.models.bundled import (
    BUNDLED,
    BUNDLED_DRAFT,
    DRAFTS,
    SMOLLM2,
    BundledModel,
    default_cache_dir,
)

_CONVERTED = "converted"  # where tandem.models.loading keeps what it made of GGUF files


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model's files on this machine, or the place where they would be."""

    name: str
    path: Path
    state: Literal["ready", "missing", "damaged", "converted", "draft"]
    num_bytes: int = 0


def local_models(cache_dir: Path, *, bundled: BundledModel = SMOLLM2) -> list[LocalModel]:
    """The bundled model, its content checked, its draft, and the converted copies of GGUF files."""
    path = cache_dir / bundled.file_name
    found = [LocalModel(name=BUNDLED, path=path, state="missing")]
    if path.is_file():
        state: Literal["ready", "damaged"] = "ready" if _sha256(path) == bundled.sha256 else "damaged"
        found = [LocalModel(name=BUNDLED, path=path, state=state, num_bytes=path.stat().st_size)]
    for draft in sorted((cache_dir / DRAFTS).glob("[!.]*.gguf")):
        found.append(LocalModel(name=BUNDLED_DRAFT, path=draft, state="draft", num_bytes=draft.stat().st_size))
    for folder in sorted((cache_dir / _CONVERTED).glob("[!.]*")):
        if folder.is_dir():
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            found.append(LocalModel(name=folder.name, path=folder, state="converted", num_bytes=size))
    return found


def list_models(console: Console) -> None:
    """One model a line."""
    models = local_models(default_cache_dir())
    width = max(len(model.name) for model in models)
    for model in models:
        style, words = _STATES[model.state]
        size = f"{(model.num_bytes or SMOLLM2.num_bytes) / 1e6:7.1f} MB"
        text = Text.assemble(f"{model.name:<{width}}  {size}  ", (f"{words:<16}", style), f"  {model.path}")
        console.print(text, soft_wrap=True)
    if models[0].state in ("missing", "damaged"):
        console.print("`tandem models pull` fetches the bundled model.")


_STATES = {
    "ready": ("green", "SHA-256 is right"),
    "missing": ("yellow", "not fetched"),
    "damaged": ("bold red", "SHA-256 is WRONG"),
    "converted": ("", "converted copy"),
    "draft": ("", "put together"),
}


def bundled_path() -> Path:
    """Where the bundled model is. Raises Unavailable when it has not been fetched."""
    path = default_cache_dir() / SMOLLM2.file_name
    if not path.is_file():
        raise Unavailable(f"the bundled model is not at {path} yet: `tandem models pull` fetches it")
    return path


def pull_models(names: Sequence[str], console: Console) -> int:
    """Fetch `names` (`bundled`, `bundled-draft`, hub ids), ready to load, one after the other; the exit code.

    Afterwards the services need no network, and may have the cache read-only.
    """
    for name in names or (BUNDLED, BUNDLED_DRAFT):
        if name in (BUNDLED, BUNDLED_DRAFT):
            fetch_with_bar(default_cache_dir(), console)
        # In a process of its own: it loads torch, and the memory is given back at its end.
        status = subprocess.run([sys.executable, "-P", "-m", "tandem.cli.prepare", name], check=False).returncode  # noqa: S603
        if status != 0:
            return status
        console.print(Text(f"{name} is ready"))
    return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
