"""The work folder: what the target was asked and answered, in shards that are written whole or not at all.

A shard is a safetensors file. Sequences are packed one after another, prompt and answer; for every token of an answer
it holds the `top` likeliest tokens at that place and the logarithms of their probabilities, largest first. So what is
left over for all others is known too: one minus their sum.

    token_ids          int32   [T]       prompts and answers
    sequence_starts    int64   [S + 1]   where each sequence begins in token_ids
    prompt_lengths     int32   [S]
    top_ids            int32   [A, top]  A: tokens of all answers
    top_log_probs      float16 [A, top]
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tandem.distill.asked import Asked
from tandem.errors import InvalidRequest

MANIFEST: Final = "manifest.json"
_SHARD: Final = "shard-{:05d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the target answered, token by token, with its law at each."""

    asked: Asked
    text: str
    prompt_ids: npt.NDArray[np.int32]  # [P]
    answer_ids: npt.NDArray[np.int32]  # [A], the end token included where there is one
    top_ids: npt.NDArray[np.int32]  # [A, top]
    top_log_probs: npt.NDArray[np.float16]  # [A, top]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An answer's text, without its laws."""

    asked: Asked
    text: str
    num_tokens: int  # of the answer


class WorkFolder:
    """Shards and manifest in `path`. One process at a time writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def shards(self) -> list[Path]:
        """In the order in which they were written."""
        return sorted(self.path.glob("shard-*.safetensors"))

    def claim(self, identity: dict[str, Any]) -> None:
        """Make the folder this target's. Raises InvalidRequest where it belongs to other work."""
        self.path.mkdir(parents=True, exist_ok=True)
        for stale in self.path.glob(".*.partial"):  # of a process that was killed
            stale.unlink()
        known = self.manifest()
        if known is None:
            self._write_manifest({"identity": identity})
        elif differing := [name for name in identity if known["identity"].get(name) != identity[name]]:
            raise InvalidRequest(
                f"{self.path} holds answers of other work: its {differing[0]} is "
                f"{known['identity'].get(differing[0])!r}, not {identity[differing[0]]!r}; give another --work folder",
                param="work",
            )

    def manifest(self) -> dict[str, Any] | None:
        """What `claim` and `add` wrote; None for a new folder. Raises InvalidRequest where it cannot be read."""
        try:
            content: dict[str, Any] = json.loads((self.path / MANIFEST).read_bytes())
            content["identity"].items()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidRequest(f"cannot read {self.path / MANIFEST}: {error}; give another folder") from error
        return content

    def add(self, answers: Sequence[Answer], *, counts: dict[str, Any]) -> None:
        """One more shard, and `counts` of everything in the manifest."""
        lengths = [len(answer.prompt_ids) + len(answer.answer_ids) for answer in answers]
        tensors = {
            "token_ids": np.concatenate([part for a in answers for part in (a.prompt_ids, a.answer_ids)]),
            "sequence_starts": np.cumsum([0, *lengths], dtype=np.int64),
            "prompt_lengths": np.array([len(answer.prompt_ids) for answer in answers], dtype=np.int32),
            "top_ids": np.concatenate([answer.top_ids for answer in answers]),
            "top_log_probs": np.concatenate([answer.top_log_probs for answer in answers]),
        }
        said = [{"asked": a.asked.to_json(), "text": a.text, "num_tokens": len(a.answer_ids)} for a in answers]
        shards = self.shards
        number = int(shards[-1].stem.removeprefix("shard-")) + 1 if shards else 0
        write_whole(self.path / _SHARD.format(number), save(tensors, metadata={"answers": json.dumps(said)}))
        known = self.manifest() or {}
        self._write_manifest({**known, "counts": counts})

    def said(self) -> Iterator[Said]:
        """All answers' texts, in the order in which they were added. Raises InvalidRequest for a damaged shard."""
        for shard in self.shards:
            for entry in json.loads(read_metadata(shard)["answers"]):
                yield Said(asked=Asked.from_json(entry["asked"]), text=entry["text"], num_tokens=entry["num_tokens"])

    def _write_manifest(self, content: dict[str, Any]) -> None:
        write_whole(self.path / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())


def read_metadata(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file. Raises InvalidRequest where it is damaged."""
    try:
        with safe_open(file, framework="numpy") as opened:
            found: dict[str, str] = opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise InvalidRequest(f"{file} is damaged ({error}); delete it, and the work goes on without it") from error
    return found


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, whenever the process or the machine ends."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
