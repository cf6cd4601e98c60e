"""A model whose every number can be computed by hand, and what plain decoding would say with it.

A text is read as a decimal number modulo 997, each token t as the digit t + 1:

    tokens (2, 0, 1)        state 0 -> 3 -> 31 -> 312
    tokens (2, 0, 1, 4)     10 * 312 + 5 = 3125 = 3 * 997 + 134 -> state 134

and the logits after the text are row `state` of a seeded table [997, vocab]. Since 10 has an inverse modulo 997, a
change of any one token, however far back, changes the state.

`ToyRunner` keeps for each token, in its block, the token itself and the state it was computed with, as a real cache
keeps keys and values that depend on the whole prefix. Whatever it answers it computes from what it reads back through
the block table, so a mistake in blocks, copy on write, truncation, eviction or prefix reuse shows in the logits, or is
raised as an error where the cells contradict each other.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from scipy import optimize, stats

from tandem.draft_law import SparseLaw
from tandem.engine.runner import RaggedBatch
from tandem.engine.worker import Program, Worker
from tandem.types import SamplingParams

MODULUS = 997

FloatArray = npt.NDArray[np.float64]


def next_state(state: int, token_id: int) -> int:
    """Append one digit."""
    return (10 * state + token_id + 1) % MODULUS


def text_state(tokens: Sequence[int]) -> int:
    """The state after a whole text; 0 for the empty one."""
    state = 0
    for token_id in tokens:
        state = next_state(state, token_id)
    return state


class ToyModel:
    """The table behind the runner, for use without one."""

    def __init__(self, *, vocab_size: int, seed: int, scale: float = 2.0) -> None:
        self.vocab_size = vocab_size
        rows = np.random.default_rng(seed).normal(0.0, scale, size=(MODULUS, vocab_size))
        self.table = torch.from_numpy(rows.astype(np.float32))

    def like(self, *, weight: float, seed: int) -> ToyModel:
        """A draft of this model: `weight` of its own logits and 1 - |weight| of foreign ones (-1: its opposite)."""
        other = ToyModel(vocab_size=self.vocab_size, seed=seed)
        other.table = weight * self.table + (1.0 - abs(weight)) * other.table
        return other

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """What follows `tokens`: [vocab]."""
        return self.table[text_state(tokens)]

    def greedy(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        """Plain greedy decoding: the next `num_tokens` tokens."""
        text = list(tokens)
        for _ in range(num_tokens):
            text.append(int(np.argmax(self.logits(text).numpy())))
        return text[len(tokens) :]

    def law(self, tokens: Sequence[int], params: SamplingParams, *, prompt_length: int) -> FloatArray:
        """Plain decoding's law of the next token [vocab], by `reference_law`."""
        return reference_law(self.logits(tokens).numpy(), params, tokens, prompt_length=prompt_length)


def reference_logits(
    logits: npt.ArrayLike, params: SamplingParams, tokens: Sequence[int], *, prompt_length: int
) -> FloatArray:
    """Logits [vocab] adjusted for the prefix `tokens`, token by token, in float64, as the definitions say."""
    adjusted = np.array(logits, dtype=np.float64)
    generated = list(tokens[prompt_length:])
    for token_id in range(len(adjusted)):
        if token_id in tokens:
            factor = params.repetition_penalty
            adjusted[token_id] = adjusted[token_id] / factor if adjusted[token_id] > 0 else adjusted[token_id] * factor
        count = generated.count(token_id)
        adjusted[token_id] -= params.frequency_penalty * count + (params.presence_penalty if count else 0.0)
    for token_id, bias in params.logit_bias:
        adjusted[token_id] += bias
    for token_id in params.banned_token_ids:
        adjusted[token_id] = -np.inf
    if len(generated) < params.min_tokens:
        for token_id in params.end_token_ids:
            adjusted[token_id] = -np.inf
    return adjusted


def reference_law(
    logits: npt.ArrayLike, params: SamplingParams, tokens: Sequence[int], *, prompt_length: int
) -> FloatArray:
    """The law [vocab] of the token after `tokens`, in float64 and by plain loops. Ties at a border stay together."""
    adjusted = reference_logits(logits, params, tokens, prompt_length=prompt_length)
    if params.temperature < 1e-5:
        one_hot = np.zeros(len(adjusted))
        one_hot[int(np.argmax(adjusted))] = 1.0
        return one_hot
    probs: FloatArray = np.exp((adjusted - adjusted.max()) / params.temperature)
    probs /= probs.sum()
    if 0 < params.top_k < len(probs):
        probs = _keep_from(probs, float(np.sort(probs)[-params.top_k]))
    if params.top_p < 1.0:
        mass, threshold = 0.0, 1.0
        for threshold in np.sort(probs)[::-1]:
            mass += threshold
            if mass >= params.top_p:
                break
        probs = _keep_from(probs, float(threshold))
    if params.min_p > 0.0:
        probs = _keep_from(probs, params.min_p * float(probs.max()))
    return probs


def _keep_from(probs: FloatArray, threshold: float) -> FloatArray:
    kept: FloatArray = np.where(probs >= threshold, probs, 0.0)
    kept /= kept.sum()
    return kept


class ModelFailure(RuntimeError):
    """What a ToyRunner raises when it was told to fail."""


@dataclass
class ToyRunner:
    """ModelRunner over a ToyModel. The n-th forward (from 0) fails where `fail_on` holds n, and lasts `step_seconds`.

    With a `gate`, each forward first takes one permit of it, so that a test can stop the model between two steps.
    """

    model: ToyModel
    block_size: int = 4
    num_blocks: int = 64
    context_length: int = 8192
    fail_on: Container[int] = ()
    step_seconds: float = 0.0
    gate: threading.Semaphore | None = None
    num_forwards: int = 0
    batches: list[RaggedBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokens = np.full((self.num_blocks, self.block_size), -1, dtype=np.int64)
        self._states = np.full((self.num_blocks, self.block_size), -1, dtype=np.int64)
        self._answer = torch.zeros(0)
        self._last_states = torch.zeros(0, 1)

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        if self.gate is not None:
            self.gate.acquire()
        number, self.num_forwards = self.num_forwards, self.num_forwards + 1
        self.batches.append(batch)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self._answer.fill_(torch.nan)  # the contract allows it: who keeps a tensor past its step must not go unpunished
        _check_contract(batch, self)
        if number in self.fail_on:
            raise ModelFailure(f"forward {number} was told to fail")
        for sequence in range(batch.num_sequences):
            self._write(batch, sequence)
        states = [self._state_at(batch, int(row)) for row in batch.logits_rows]
        self._last_states = torch.tensor(states, dtype=torch.float32)[:, None]
        self._answer = self.model.table[states] if states else torch.zeros(1, 0)
        return self._answer

    def step_size(self, num_sequences: int, *, tokens_each: int) -> int:
        return num_sequences * tokens_each

    @property
    def last_step_size(self) -> int:
        return self.batches[-1].num_tokens

    @property
    def last_states(self) -> torch.Tensor:
        """A text's hidden state is its number."""
        return self._last_states

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._tokens[list(destinations)] = self._tokens[list(sources)]
        self._states[list(destinations)] = self._states[list(sources)]

    def read(self, blocks: Sequence[int], length: int) -> list[int]:
        """The first `length` tokens that `blocks` hold."""
        return [int(token_id) for token_id in self._tokens[list(blocks)].reshape(-1)[:length]]

    def _write(self, batch: RaggedBatch, sequence: int) -> None:
        first, end = (int(start) for start in batch.sequence_starts[sequence : sequence + 2])
        blocks = batch.block_table[batch.block_starts[sequence] : batch.block_starts[sequence + 1]]
        past = int(batch.past_lens[sequence])
        tokens, states = self._tokens[blocks].reshape(-1), self._states[blocks].reshape(-1)
        state = 0
        for position in range(past):  # what the cache holds must be one text, computed from its start
            state = next_state(state, int(tokens[position]))
            assert states[position] == state, (
                f"position {position} of sequence {sequence} was computed for another text"
            )
        for position, token_id in enumerate(batch.token_ids[first:end], start=past):
            state = next_state(state, int(token_id))
            cell = blocks[position // self.block_size], position % self.block_size
            self._tokens[cell], self._states[cell] = token_id, state

    def _state_at(self, batch: RaggedBatch, row: int) -> int:
        sequence = int(np.searchsorted(batch.sequence_starts, row, side="right")) - 1
        blocks = batch.block_table[batch.block_starts[sequence] : batch.block_starts[sequence + 1]]
        length = int(batch.past_lens[sequence]) + row - int(batch.sequence_starts[sequence]) + 1
        return text_state(self.read([int(block) for block in blocks], length))


@dataclass(frozen=True)
class ToyHead:
    """A DraftHead for a ToyRunner's target: what `model` says, the target itself or one that is like it."""

    model: ToyModel
    calls: list[int] = field(default_factory=list)  # how many tokens each was for

    def laws(self, states: torch.Tensor, token_ids: Sequence[int]) -> list[SparseLaw]:
        self.calls.append(len(token_ids))
        after = [next_state(int(state), token) for state, token in zip(states[:, 0].tolist(), token_ids, strict=True)]
        probs, ids = self.model.table[after].softmax(dim=-1).sort(dim=-1, descending=True)
        return [SparseLaw(i.numpy().astype(np.uint32), p.numpy()) for i, p in zip(ids, probs, strict=True)]


def _check_contract(batch: RaggedBatch, runner: ToyRunner) -> None:
    """Raise where a batch breaks the promises of RaggedBatch."""
    total, sequences = batch.num_tokens, batch.num_sequences
    assert total > 0, "nothing to compute"
    assert len(batch.sequence_starts) == len(batch.block_starts) == sequences + 1
    assert batch.sequence_starts[0] == batch.block_starts[0] == 0
    assert batch.sequence_starts[-1] == total == len(batch.position_ids)
    assert batch.block_starts[-1] == len(batch.block_table)
    assert bool((np.diff(batch.sequence_starts) > 0).all()), "a sequence without tokens"
    assert bool((np.diff(batch.logits_rows) > 0).all()), "rows are not ascending"
    assert not len(batch.logits_rows) or 0 <= batch.logits_rows[0] <= batch.logits_rows[-1] < total
    assert bool((batch.block_table >= 0).all())
    assert bool((batch.block_table < runner.num_blocks).all())
    written: list[int] = []
    for sequence in range(sequences):
        past = int(batch.past_lens[sequence])
        first, end = (int(start) for start in batch.sequence_starts[sequence : sequence + 2])
        assert batch.position_ids[first:end].tolist() == list(range(past, past + end - first))
        blocks = batch.block_table[batch.block_starts[sequence] : batch.block_starts[sequence + 1]].tolist()
        assert len(set(blocks)) == len(blocks), "a block twice in one sequence"
        assert len(blocks) * runner.block_size >= past + end - first, "no room for the new tokens"
        written += blocks[past // runner.block_size : -(-(past + end - first) // runner.block_size)]
    for block in written:
        assert batch.block_table.tolist().count(block) == 1, f"block {block} is written while another reads it"


@dataclass
class StepLog:
    """A StepObserver that remembers."""

    num_tokens: list[int] = field(default_factory=list)
    num_sequences: list[int] = field(default_factory=list)

    def step(self, *, seconds: float, num_tokens: int, num_sequences: int) -> None:
        self.num_tokens.append(num_tokens)
        self.num_sequences.append(num_sequences)


@contextmanager
def working(
    runner: ToyRunner, *, max_step_tokens: int = 64, max_programs: int = 64, log: StepLog | None = None
) -> Iterator[Worker]:
    """A running worker, closed at the end."""
    worker = Worker(
        runner,
        name="toy",
        max_step_tokens=max_step_tokens,
        max_programs=max_programs,
        observer=StepLog() if log is None else log,
    )
    worker.start()
    try:
        yield worker
    finally:
        worker.close()


def held_blocks(worker: Worker) -> Program[int]:
    """A program that needs no forward: the blocks held, once all that was sent before it is done."""
    yield from ()
    return worker.pool.num_held


async def until_idle(worker: Worker) -> None:
    """Wait until no program is left, those of the background included."""

    def num_others() -> Program[int]:
        yield from ()
        return len(worker._jobs) - 1

    num_idle = 0
    while num_idle < 2:  # twice in a row: programs that others have just started may stand behind the question
        num_idle = 0 if (await worker.run(num_others())).value else num_idle + 1
        await asyncio.sleep(0.0005)


# How well counts fit an exact law. With fixed seeds a test passes or fails for good; FALSE_ALARM is the probability
# that right code and other seeds would have failed it.
FALSE_ALARM = 1e-6


def misfit(counts: npt.ArrayLike, probs: npt.ArrayLike) -> float:
    """The p-value of Pearson's chi-square test of `counts` against the law `probs`, both of any one shape.

    Cells with fewer than 5 expected are pooled. A count where the law has nothing at all is a misfit for certain.
    """
    seen = np.asarray(counts, dtype=np.float64).reshape(-1)
    expected = np.asarray(probs, dtype=np.float64).reshape(-1) * seen.sum()
    assert abs(expected.sum() / seen.sum() - 1.0) < 1e-5, "the expected law does not sum to 1"
    if bool((seen[expected < 1e-7 * seen.sum()] > 3).any()) or bool((seen[expected == 0.0] > 0).any()):
        return 0.0
    small = expected < 5.0
    cells = [*zip(seen[~small], expected[~small], strict=True)]
    if float(expected[small].sum()) >= 5.0:
        cells.append((seen[small].sum(), expected[small].sum()))
    elif cells:  # too little for a cell of its own
        smallest = min(range(len(cells)), key=lambda index: float(cells[index][1]))
        cells[smallest] = (cells[smallest][0] + seen[small].sum(), cells[smallest][1] + expected[small].sum())
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    return float(stats.chi2.sf(statistic, max(1, len(cells) - 1)))


def smallest_visible_error(*, num_cells: int, num_trials: int) -> float:
    """The total-variation error that `misfit` < FALSE_ALARM finds with probability 0.99, wherever the error lies.

    An error of that size gives a noncentrality of at least num_trials * (2 * error)^2.
    """
    critical = stats.chi2.isf(FALSE_ALARM, num_cells - 1)
    noncentrality = optimize.brentq(lambda x: stats.ncx2.sf(critical, num_cells - 1, x) - 0.99, 1e-3, 1e4)
    return 0.5 * float(np.sqrt(noncentrality / num_trials))
