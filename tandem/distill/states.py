"""The target's last hidden states along its answers, which a draft head learns from, in the work folder.

    states.npy     float16 [A, W]   A: tokens of all answers, in their order; W: the target's width
    states.json    which answers these are, and how many rows are done

The row of an answer's token is what the target's head made that token's law of: the state at the token before it.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tandem.distill.batching import most_tokens
from tandem.distill.dataset import Example
from tandem.distill.work_folder import write_whole
from tandem.engine.runner import ModelRunner, RaggedBatch
from tandem.errors import InvalidRequest, Unavailable

STATES: Final = "states.npy"
RECORD: Final = "states.json"
_BATCH_TOKENS: Final = 1024
_BATCH_ROWS: Final = 512  # each makes logits of the whole vocabulary, too
_SAVE_SECONDS: Final = 30.0
_LARGEST: Final = float(np.finfo(np.float16).max)

Float16Array = npt.NDArray[np.float16]


class States:
    """The states of these answers, which are those of `shards`, in `folder`. One process at a time writes."""

    def __init__(self, folder: Path, shards: Sequence[Path], examples: Sequence[Example]) -> None:
        self._path, self._record_path = folder / STATES, folder / RECORD
        self._examples = examples
        self._starts = np.cumsum([0, *(len(example.top_ids) for example in examples)])
        self._identity = {"shards": [shard.name for shard in shards], "answers": _digest(examples)}

    @property
    def identity(self) -> dict[str, Any]:
        """Plain values, which other answers do not share."""
        return self._identity

    @property
    def num_rows(self) -> int:
        return int(self._starts[-1])

    @property
    def num_done(self) -> int:
        """Rows that an earlier run has left; none where they are of other answers."""
        try:
            record = json.loads(self._record_path.read_bytes())
            if record["identity"] != self._identity or len(self._kept("r")) != self.num_rows:
                return 0
            return min(int(record["done"]), self.num_rows)
        except (OSError, ValueError, TypeError, KeyError):
            return 0

    def compute(self, runner: ModelRunner, *, advance: Callable[[int, float], None], stop: Callable[[], bool]) -> bool:
        """Whether all rows are done now, from where an earlier run was ended: not where `stop` says so.

        `advance` is told how many are done, and rows a second of this run. Raises InvalidRequest where the runner's
        cache does not hold an answer, Unavailable where the disk does not hold the states.
        """
        longest, room = max(map(len, self._examples)), most_tokens(runner)
        if longest > room:
            raise InvalidRequest(
                f"the cache holds {room:,} tokens, an answer and its prompt {longest:,}: give more (--kv-cache-gib)",
                param="kv_cache_gib",
            )
        done = self.num_done
        first = int(np.searchsorted(self._starts, done, side="right")) - 1
        already = row = int(self._starts[first])
        kept = self._kept("r+") if done else None
        began = saved = time.monotonic()
        try:
            for group in _groups(self._examples[first:], runner):
                if stop():
                    return False
                runner.forward(_batch(group, runner.block_size))
                states = runner.last_states.float().clamp(-_LARGEST, _LARGEST).to("cpu", torch.float16).numpy()
                if kept is None:
                    kept = self._new(width=states.shape[1])
                kept[row : row + len(states)] = states
                row += len(states)
                if time.monotonic() - saved > _SAVE_SECONDS:
                    self._save(kept, row)
                    saved = time.monotonic()
                advance(row, (row - already) / (time.monotonic() - began))
        finally:
            if kept is not None:
                self._save(kept, row)
        return True

    def read(self) -> Float16Array:
        """All rows [A, W], mapped from the file: what is looked at is read."""
        return self._kept("r")

    def _kept(self, mode: Any) -> np.memmap[Any, np.dtype[np.float16]]:
        kept: np.memmap[Any, np.dtype[np.float16]] = np.load(self._path, mmap_mode=mode)
        return kept

    def _new(self, *, width: int) -> np.memmap[Any, np.dtype[np.float16]]:
        self._record_path.unlink(missing_ok=True)  # first: it must never speak of rows that are not there
        self._path.unlink(missing_ok=True)
        size, room = self.num_rows * width * 2, shutil.disk_usage(self._path.parent).free
        if size > room:  # of a mapped file the system would end the process
            raise Unavailable(
                f"the target's states take {size / 1e9:.1f} GB, and {self._path.parent} has room for {room / 1e9:.1f}: "
                "make room, or let the head learn from fewer answers (--head-tokens)"
            )
        return np.lib.format.open_memmap(self._path, mode="w+", dtype=np.float16, shape=(self.num_rows, width))

    def _save(self, kept: np.memmap[Any, np.dtype[np.float16]], done: int) -> None:
        kept.flush()
        write_whole(self._record_path, json.dumps({"identity": self._identity, "done": done}).encode())


def _digest(examples: Sequence[Example]) -> str:
    content = hashlib.sha256()
    for example in examples:
        content.update(np.array([len(example), example.prompt_length]).tobytes() + example.token_ids.tobytes())
    return content.hexdigest()


def _groups(examples: Sequence[Example], runner: ModelRunner) -> Iterator[list[Example]]:
    """All of them in order, several where they fit into a batch together."""
    most = np.array([_BATCH_TOKENS, _BATCH_ROWS, runner.num_blocks])
    group: list[Example] = []
    size = np.zeros_like(most)
    for example in examples:
        own = np.array([len(example), len(example.top_ids), math.ceil(len(example) / runner.block_size)])
        if group and bool((size + own > most).any()):
            yield group
            group, size = [], np.zeros_like(most)
        group.append(example)
        size = size + own
    if group:
        yield group


def _batch(group: Sequence[Example], block_size: int) -> RaggedBatch:
    """Whole examples but for the last token, behind which nothing was said; rows are those that answers came of."""
    lengths = [len(example) - 1 for example in group]
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    num_blocks = [math.ceil(length / block_size) for length in lengths]
    rows = [
        start + np.arange(example.prompt_length - 1, length, dtype=np.int32)
        for start, example, length in zip(starts[:-1], group, lengths, strict=True)
    ]
    return RaggedBatch(
        token_ids=np.concatenate([example.token_ids[:-1] for example in group]),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        past_lens=np.zeros(len(group), dtype=np.int32),
        sequence_starts=starts,
        decode_starts=np.array(lengths, dtype=np.int32),
        block_table=np.arange(sum(num_blocks), dtype=np.int32),
        block_starts=np.cumsum([0, *num_blocks], dtype=np.int32),
        logits_rows=np.concatenate(rows),
    )
