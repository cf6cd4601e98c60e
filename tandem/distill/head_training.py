"""Training a draft head: the answers as rows of states, tokens and laws; the schedule; how often it is accepted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tandem.distill.asked import Asked
from tandem.distill.dataset import Example
from tandem.distill.head import HeadNetwork, HeadSettings
from tandem.distill.loss import law_loss
from tandem.distill.optimizing import Meter, TrainingReport, adamw, descend, rate_share
from tandem.errors import InvalidRequest

_ROWS_AT_ONCE: Final = 512
_MOST_IN_MEMORY: Final = 4 << 30  # bytes of states; more are read from the disk, row by row

Int64Array = npt.NDArray[np.int64]
Logits = Callable[["HeadBatch"], torch.Tensor]  # [n, V], float32


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBatch:
    """n tokens of answers, the states that they came of, and the target's laws of the tokens behind them."""

    states: torch.Tensor  # [n, W], float32
    token_ids: Int64Array  # [n]
    places: torch.Tensor  # [n], in the head's vocabulary; its size for a token that it lacks
    target_ids: torch.Tensor  # [n, top], places in the head's vocabulary
    target_probs: torch.Tensor  # [n, top], zero where the head's vocabulary lacks the token
    next_ids: Int64Array  # [n], what was said behind them


@dataclass(frozen=True, slots=True)
class HeadAcceptance:
    """Shares of tokens that are accepted in held-out answers: at temperature 0 in those drawn at 0, at 1 in those at 1.

    The second is the mean sum of min(target's law, head's law) over the target's likeliest tokens: a little too low.
    """

    greedy: float
    sampled: float

    @property
    def score(self) -> float:
        return self.greedy + self.sampled


class HeadData:
    """All answers, one after another, with a state for each token: see states.py. `vocabulary` [V], ascending.

    A row is an answer's token that another one follows. Raises InvalidRequest where there is none to train on.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        states: npt.NDArray[np.float16],
        vocabulary: Int64Array,
        *,
        device: torch.device,
    ) -> None:
        self.vocabulary = vocabulary
        self._states = np.array(states) if states.nbytes <= _MOST_IN_MEMORY else states
        self._device = device
        self._token_ids = np.concatenate([e.token_ids[e.prompt_length :] for e in examples]).astype(np.int64)
        self._top_ids = np.concatenate([example.top_ids for example in examples])
        self._top_log_probs = np.concatenate([example.top_log_probs for example in examples])
        most = max(int(ids.max()) for ids in (self._token_ids, self._top_ids, vocabulary)) + 1
        self._places = np.full(most, -1, dtype=np.int64)
        self._places[vocabulary] = np.arange(len(vocabulary))
        self.training = _rows(examples, lambda asked: not asked.validation)
        self._greedy = _rows(examples, lambda asked: asked.validation and asked.temperature == 0.0)
        self._sampled = _rows(examples, lambda asked: asked.validation and asked.temperature == 1.0)
        if not len(self.training):
            raise InvalidRequest(
                "the answers to train on are of one token each: generate more (--tokens)", param="tokens"
            )

    def column_sizes(self) -> torch.Tensor:
        """Root mean squares of the training states' columns [W]."""
        total = np.zeros(self._states.shape[1])
        for start in range(0, len(self.training), _ROWS_AT_ONCE):
            rows = self.training[start : start + _ROWS_AT_ONCE]
            total += np.square(self._states[rows].astype(np.float64)).sum(axis=0)
        return torch.from_numpy(np.sqrt(total / len(self.training)).astype(np.float32))

    def batch(self, rows: Int64Array) -> HeadBatch:
        token_ids, behind = self._token_ids[rows], rows + 1
        own, target = self._places[token_ids], self._places[self._top_ids[behind]]
        probs = np.where(target < 0, 0.0, np.exp(self._top_log_probs[behind].astype(np.float32))).astype(np.float32)
        return HeadBatch(
            states=torch.from_numpy(np.asarray(self._states[rows])).to(self._device).float(),
            token_ids=token_ids,
            places=torch.from_numpy(np.where(own < 0, len(self.vocabulary), own)).to(self._device),
            target_ids=torch.from_numpy(target.clip(min=0)).to(self._device),
            target_probs=torch.from_numpy(probs).to(self._device),
            next_ids=self._token_ids[behind],
        )

    @torch.no_grad()
    def acceptance(self, logits_of: Logits) -> HeadAcceptance:
        """How often a head with these logits is accepted on the held-out answers; 0 where there are none."""
        right: list[npt.NDArray[np.float32]] = []
        for batch in self._in_pieces(self._greedy):
            said = self.vocabulary[logits_of(batch).argmax(dim=-1).cpu().numpy()]
            right.append((said == batch.next_ids).astype(np.float32))
        overlaps: list[npt.NDArray[np.float32]] = []
        for batch in self._in_pieces(self._sampled):
            logits = logits_of(batch)
            law = (logits.gather(1, batch.target_ids) - logits.logsumexp(dim=-1, keepdim=True)).exp()
            overlaps.append(torch.minimum(law, batch.target_probs).sum(dim=-1).cpu().numpy())
        return HeadAcceptance(greedy=_mean(right), sampled=_mean(overlaps))

    def _in_pieces(self, rows: Int64Array) -> Iterator[HeadBatch]:
        return (self.batch(rows[start : start + _ROWS_AT_ONCE]) for start in range(0, len(rows), _ROWS_AT_ONCE))


def train_head(
    network: HeadNetwork,
    data: HeadData,
    settings: HeadSettings,
    *,
    bfloat16: bool,
    advance: Callable[[TrainingReport], None],
    evaluated: Callable[[HeadAcceptance], None],
    stop: Callable[[], bool],
) -> bool:
    """Train, and leave the weights with the best acceptance in the network; False where `stop` ended it before."""
    steps = max(1, round(settings.epochs * math.ceil(len(data.training) / settings.batch_rows)))
    every = max(1, math.ceil(steps / settings.evaluations))
    head = network.out.bfloat16() if bfloat16 else network.out
    parameters = list(network.parameters())
    optimizer = adamw(parameters, learning_rate=settings.learning_rate, weight_decay=settings.weight_decay)
    best: dict[str, torch.Tensor] = {}
    best_score = -1.0
    found: HeadAcceptance | None = None
    meter = Meter()
    for step, rows in enumerate(_batches(data.training, settings, steps), start=1):
        if stop():
            return False
        batch = data.batch(rows)
        with torch.autocast(head.device.type, dtype=torch.bfloat16, enabled=bfloat16):
            hidden = network(batch.states, batch.places)
        loss = law_loss(hidden.float(), head, batch.target_ids, batch.target_probs, overlap=settings.overlap)
        rate = settings.learning_rate * rate_share(step - 1, steps)
        meter.add(descend(loss, optimizer, parameters, learning_rate=rate), len(rows))
        if step % every == 0 or step == steps:
            found = data.acceptance(lambda batch: network(batch.states, batch.places) @ network.out.T)
            evaluated(found)
            if found.score >= best_score:
                best_score = found.score
                best = {name: value.detach().clone() for name, value in network.named_parameters()}
        advance(
            TrainingReport(
                step=step,
                steps=steps,
                loss=meter.loss,
                tokens_per_second=meter.tokens_per_second,
                greedy=None if found is None else found.greedy,
            )
        )
    with torch.no_grad():
        for name, value in network.named_parameters():
            value.copy_(best[name])
    return True


def _batches(rows: Int64Array, settings: HeadSettings, steps: int) -> Iterator[Int64Array]:
    """`steps` of them: all rows once in random order, then once more, and so on."""
    pieces = (
        order[start : start + settings.batch_rows]
        for epoch in itertools.count()
        for order in (np.random.default_rng((settings.seed, epoch)).permutation(rows),)
        for start in range(0, len(order), settings.batch_rows)
    )
    return itertools.islice(pieces, steps)


def _rows(examples: Sequence[Example], wanted: Callable[[Asked], bool]) -> Int64Array:
    """Rows of these answers, all but each one's last token."""
    ends = np.cumsum([len(example.top_ids) for example in examples])
    own = [
        np.arange(end - len(example.top_ids), end - 1, dtype=np.int64)
        for example, end in zip(examples, ends, strict=True)
        if wanted(example.asked)
    ]
    return np.concatenate(own) if own else np.empty(0, dtype=np.int64)


def _mean(pieces: Sequence[npt.NDArray[np.float32]]) -> float:
    return float(np.concatenate(pieces).mean()) if pieces else 0.0
