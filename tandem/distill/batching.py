"""Continuous batches of answers: prompts go in as places come free, whole answers come out, with their laws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.runner import ModelRunner, RaggedBatch
from tandem.engine.sampling import likeliest
from tandem.randomness import Purpose, uniform

_LOOP_CHECK: Final = 8  # every so many tokens
_LONGEST_LOOP: Final = 40
_SHORTEST_LOOPS: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Tokens to continue, and how. `seed` decides what is drawn above temperature 0; `tag` is the caller's."""

    token_ids: Sequence[int]
    temperature: float
    seed: int
    max_tokens: int
    tag: Any


class Stop(Protocol):
    """Whether to end now, with answers unfinished."""

    def __call__(self) -> bool: ...


@dataclass(slots=True)
class Continuation:
    """A prompt, the tokens that follow it, and the target's law at each: see tandem/distill/work_folder.py."""

    prompt: Prompt
    blocks: list[int]
    token_ids: list[int] = field(default_factory=list)
    top_ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    top_log_probs: list[npt.NDArray[np.float16]] = field(default_factory=list)


def most_tokens(runner: ModelRunner) -> int:
    """The longest prompt and answer together that a runner's cache and context hold."""
    return min(runner.context_length, runner.num_blocks * runner.block_size)


def continuations(
    runner: ModelRunner,
    take: Callable[[], Prompt | None],
    *,
    end_token_ids: frozenset[int],
    batch_size: int,
    step_tokens: int,
    top: int,
    stop: Stop,
) -> Iterator[Continuation]:
    """Prompts from `take` continued, at most `batch_size` at a time.

    Each ends at an end token, at its `max_tokens`, or where it has said the same thing three times running: small
    models do, for ever, and nothing more is learnt from it.

    `take` is asked whenever there is room, and may answer None: nothing for now. Ends when nothing is left to do, or
    at the next step after `stop` says so. Prompts are computed up to about `step_tokens` a step, beside the others'
    next tokens. No prompt may be longer than `most_tokens`, its answer included.
    """
    free = list(range(runner.num_blocks))
    active: list[Continuation] = []
    held_back: Prompt | None = None
    while not stop():
        fresh: list[Continuation] = []
        room = step_tokens
        while len(active) + len(fresh) < batch_size and room > 0:
            prompt = held_back or take()
            held_back = None
            if prompt is None:
                break
            needed = math.ceil((len(prompt.token_ids) + prompt.max_tokens) / runner.block_size)
            if needed > len(free):
                held_back = prompt
                break
            fresh.append(Continuation(prompt, [free.pop() for _ in range(needed)]))
            room -= len(prompt.token_ids)
        active += fresh
        if not active:
            return
        logits = runner.forward(_batch(active))
        _extend(active, logits, top)
        ended = [continuation for continuation in active if _has_ended(continuation, end_token_ids)]
        if ended:
            gone = set(map(id, ended))
            active = [continuation for continuation in active if id(continuation) not in gone]
        for continuation in ended:
            free += continuation.blocks
            yield continuation


def _has_ended(continuation: Continuation, end_token_ids: frozenset[int]) -> bool:
    said = continuation.token_ids
    if said[-1] in end_token_ids or len(said) >= continuation.prompt.max_tokens:
        return True
    return len(said) % _LOOP_CHECK == 0 and loops(said)


def loops(token_ids: Sequence[int]) -> bool:
    """Whether the end is one piece of up to 40 tokens three times over; a short piece, so often that it fills 24."""
    for period in range(1, min(_LONGEST_LOOP, len(token_ids) // 3) + 1):
        size = period * max(3, math.ceil(_SHORTEST_LOOPS / period))
        if len(token_ids) >= size and list(token_ids[-size:-period]) == list(token_ids[period - size :]):
            return True
    return False


def _batch(active: Sequence[Continuation]) -> RaggedBatch:
    """Whole prompts of those that are new, and the last token of each other."""
    news = [c.token_ids[-1:] or list(c.prompt.token_ids) for c in active]
    pasts = [len(c.prompt.token_ids) + len(c.token_ids) - 1 if c.token_ids else 0 for c in active]
    starts = np.cumsum([0, *map(len, news)], dtype=np.int32)
    return RaggedBatch(
        token_ids=np.concatenate([np.asarray(new, dtype=np.int32) for new in news]),
        position_ids=np.concatenate(
            [np.arange(past, past + len(new), dtype=np.int32) for past, new in zip(pasts, news, strict=True)]
        ),
        past_lens=np.array(pasts, dtype=np.int32),
        sequence_starts=starts,
        decode_starts=np.array([len(c.prompt.token_ids) for c in active], dtype=np.int32),
        block_table=np.concatenate([np.array(c.blocks, dtype=np.int32) for c in active]),
        block_starts=np.cumsum([0, *(len(c.blocks) for c in active)], dtype=np.int32),
        logits_rows=starts[1:] - 1,
    )


def _extend(active: Sequence[Continuation], logits: torch.Tensor, top: int) -> None:
    """One more token for each, drawn from its row of `logits` [len(active), vocab]."""
    log_sums = torch.logsumexp(logits, dim=-1, keepdim=True)
    values, ids = torch.topk(logits, min(top, logits.shape[-1]), dim=-1)
    log_probs = (values - log_sums).cpu().numpy()
    unordered = ids.to(torch.int32).cpu().numpy()
    order = np.lexsort((unordered, -log_probs))  # of equal ones the lowest id first
    top_ids = np.take_along_axis(unordered, order, axis=-1)
    top_log_probs = np.take_along_axis(log_probs, order, axis=-1).astype(np.float16)
    greedy = likeliest(logits)
    for row, continuation in enumerate(active):
        continuation.top_ids.append(top_ids[row])
        continuation.top_log_probs.append(top_log_probs[row])
        continuation.token_ids.append(_draw(continuation, logits[row], greedy[row]))


def _draw(continuation: Continuation, logits: torch.Tensor, greedy: int) -> int:
    """The next token of a continuation, from the whole law [vocab] at its temperature."""
    prompt = continuation.prompt
    if prompt.temperature == 0.0:
        return greedy
    row = logits.cpu().numpy()
    weights = np.exp((row - row.max()) / np.float32(prompt.temperature)).cumsum(dtype=np.float64)
    position = len(prompt.token_ids) + len(continuation.token_ids)
    drawn = uniform(prompt.seed, position, Purpose.TARGET) * weights[-1]
    return int(np.searchsorted(weights, drawn, side="right"))
