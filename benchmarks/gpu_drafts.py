"""Drafts of five tokens for `gpu_check`: one step after another, and in one step that goes on by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from benchmarks.gpu_cases import Plan, make_batch, on_blocks_of
from tandem.engine.runner import Ahead, Choosing, RaggedBatch
from tandem.engine.sampling import likeliest
from tandem.engine.torch_runner import TorchRunner

NUM_TOKENS = 5
_GREEDY = Choosing(0.0, 1, (0.0,) * (NUM_TOKENS - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTiming:
    """A draft of each of `num_texts`, in milliseconds; the step that goes on is None where it was not recorded."""

    num_texts: int
    eager_ms: float
    recorded_ms: float
    gone_on_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    timings: list[DraftTiming]
    largest_difference: float  # of the last tokens' logits, relative, as a norm
    problems: list[str]


def compare_drafts(
    eager: TorchRunner,
    recorded: TorchRunner,
    plan: Plan,
    *,
    most_difference: float,
    milliseconds: Callable[[Callable[[], object]], float],
) -> Drafts:
    """Greedy drafts behind texts of the shortest context, whose cache is whatever the blocks hold."""
    timings, problems, largest = [], list[str](), 0.0
    for num_texts in plan.batches:
        context = plan.contexts[0]
        table = make_batch([(context, NUM_TOKENS)] * num_texts, eager.vocab_size)
        batch = on_blocks_of(table, make_batch([(context, 1)] * num_texts, eager.vocab_size))
        tokens, logits = _step_by_step(recorded, batch)
        gone_on = _going_on(recorded, batch)
        if gone_on is None:
            problems.append(f"a draft of {num_texts} texts was not gone on with in one step")
        else:
            last = gone_on.logits.view(num_texts, NUM_TOKENS, -1)[:, -1]
            same = [row for row in range(num_texts) if gone_on.token_ids[row] == tokens[row]]
            if not same:  # numeric ties may part one or another, but not all
                problems.append(f"drafts of {num_texts} texts are others in one step than step by step")
            else:
                difference = float((last[same] - logits[same]).norm() / logits[same].norm())
                largest = max(largest, difference)
                if not difference <= most_difference:
                    problems.append(f"logits behind drafts of {num_texts} texts differ by {difference:.2%}")
        timings.append(
            DraftTiming(
                num_texts=num_texts,
                eager_ms=milliseconds(partial(_step_by_step, eager, batch)),
                recorded_ms=milliseconds(partial(_step_by_step, recorded, batch)),
                gone_on_ms=None if gone_on is None else milliseconds(partial(_going_on, recorded, batch)),
            )
        )
    return Drafts(timings=timings, largest_difference=largest, problems=problems)


def _step_by_step(runner: TorchRunner, batch: RaggedBatch) -> tuple[list[list[int]], torch.Tensor]:
    """The tokens before the last one [S][4], each chosen by the host, and the logits behind them [S, vocab]."""
    tokens: list[list[int]] = []
    logits = runner.forward(batch)
    for _ in range(NUM_TOKENS - 1):
        tokens.append(likeliest(logits))
        batch = replace(
            batch,
            token_ids=np.array(tokens[-1], dtype=np.int32),
            position_ids=batch.position_ids + 1,
            past_lens=batch.past_lens + 1,
        )
        logits = runner.forward(batch)
    likeliest(logits)
    return [list(row) for row in zip(*tokens, strict=True)], logits.clone()


def _going_on(runner: TorchRunner, batch: RaggedBatch) -> Ahead | None:
    ahead = runner.forward_ahead(batch, [_GREEDY] * batch.num_sequences)
    if ahead is not None:
        likeliest(ahead.logits)
    return ahead
