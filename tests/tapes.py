"""A tape that plays the part of a CUDA graph, and tiny runners with sequences that are ready for a decode step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from tandem.engine.static_decode import Capture, Rows, Step
from tandem.engine.torch_runner import TorchRunner
from tests.tiny_families import BLOCK, VOCAB, Chunk, make_model, pack, prompt

NUM_BLOCKS = 200


class Tape(TorchDispatchMode):
    """A step's operations, in order. Refuses what a CUDA graph refuses: numbers that Python looks at."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, Sequence[Any], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(f"{func} while recording")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def play(self, last: Rows) -> Rows:
        """Repeat all; what `last` was then is the result."""
        now: dict[int, torch.Tensor] = {}  # by identity: what took the place of a recorded result

        def current(tensor: torch.Tensor) -> torch.Tensor:
            return now.get(id(tensor), tensor)

        for func, args, kwargs, recorded in self.operations:
            args, kwargs = tree_map_only(torch.Tensor, current, (args, kwargs))
            results = func(*args, **kwargs)
            for before, after in zip(tree_iter(recorded), tree_iter(results), strict=True):
                if isinstance(before, torch.Tensor):
                    now[id(before)] = after
        return Rows(*map(current, last))


class TapeRecorder:
    """A Capture that records each step once."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.num_played = 0

    def __call__(self, step: Step) -> Step:
        tape = Tape()
        with tape:
            result = step()
        self.tapes.append(tape)

        def play() -> Rows:
            self.num_played += 1
            return tape.play(result)

        return play


def make_runner(family: str, capture: Capture | None) -> TorchRunner:
    return TorchRunner(make_model(family), vocab_size=VOCAB, block_size=BLOCK, num_blocks=NUM_BLOCKS, capture=capture)


def chunks_of(lengths: Sequence[int], new: Sequence[int], *, seed: int) -> list[Chunk]:
    """Sequences of `lengths` tokens, `new` of them not cached yet, in blocks strewn over the pool."""
    order = np.random.default_rng(seed).permutation(NUM_BLOCKS).tolist()
    chunks = []
    for i, (length, count) in enumerate(zip(lengths, new, strict=True)):
        blocks, order = order[: -(-length // BLOCK)], order[-(-length // BLOCK) :]
        chunks.append(Chunk(prompt(length, seed=100 * seed + i)[-count:], length - count, blocks))
    return chunks


def prefill(runner: TorchRunner, lengths: Sequence[int], new: Sequence[int], *, seed: int) -> list[Chunk]:
    """Compute all but the new tokens; the chunks that are then missing."""
    chunks = chunks_of(lengths, new, seed=seed)
    for i, (chunk, length) in enumerate(zip(chunks, lengths, strict=True)):
        if chunk.past:
            runner.forward(pack([Chunk(prompt(length, seed=100 * seed + i)[: chunk.past], 0, chunk.blocks, "none")]))
    return chunks
