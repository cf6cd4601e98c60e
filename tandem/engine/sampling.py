"""From logits to the law at each position, and a draw from it. Pure; float32 throughout.

One implementation serves draft and target, drafted positions included, so that `target_probs` is at every position
what plain decoding would sample from, and `draft_probs` as near to it as the draft model allows.

Order (as Hugging Face's processors): repetition, presence and frequency penalties, logit_bias, banned tokens,
temperature, top_k, top_p, min_p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from tandem.draft_law import SparseLaw
from tandem.types import SamplingParams

# The first guess at how much less probable than the likeliest a token may be and still be among the top ones.
_FIRST_CUT = 1 / 64
_SMALLEST = 1e-12  # below this, all are looked at


def adjusted_logits(
    logits: torch.Tensor, params: SamplingParams, tokens: Sequence[int], *, prompt_length: int
) -> torch.Tensor:
    """Logits [R, vocab] after everything that depends on the prefix, as float32 [R, vocab] (may be the input).

    Row i belongs to the position after `tokens[: len(tokens) - R + 1 + i]`: the rows of the last R tokens, drafted
    ones counted in the prefix of those behind them. Presence and frequency count generated tokens only, repetition
    counts the prompt too, as in vLLM.
    """
    rows, vocab = logits.shape
    first_prefix = len(tokens) - rows + 1
    early_rows = max(0, min(rows, params.min_tokens - (first_prefix - prompt_length)))
    penalised = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
    if not (penalised or params.logit_bias or params.banned_token_ids or (early_rows and params.end_token_ids)):
        return logits
    logits = logits.clone()
    if penalised:
        generated, seen = _token_counts(tokens, first_prefix, rows, vocab, prompt_length=prompt_length)
        generated, seen = generated.to(logits.device), seen.to(logits.device)
        if params.repetition_penalty != 1.0:
            lowered = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits = torch.where(seen, lowered, logits)
        logits -= params.frequency_penalty * generated
        logits -= params.presence_penalty * (generated > 0)
    for token_id, bias in params.logit_bias:
        logits[:, token_id] += bias
    if params.banned_token_ids:
        logits[:, list(params.banned_token_ids)] = -torch.inf
    if early_rows and params.end_token_ids:
        logits[:early_rows, list(params.end_token_ids)] = -torch.inf
    return logits


def law(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Adjusted logits [R, vocab] -> probabilities [R, vocab], float32, rows sum to 1.

    top_k, top_p and min_p each keep every token at least as probable as a threshold, so ties at a border stay
    together and the law does not depend on the order in which equal values are sorted.
    """
    if params.greedy:
        choices = torch.tensor(likeliest(logits), device=logits.device) if on_host(logits) else logits.argmax(dim=-1)
        return torch.nn.functional.one_hot(choices, logits.shape[-1]).to(torch.float32)
    # The maximum is taken off first: at a tiny temperature the quotients are then -large or 0, never inf or NaN.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / params.temperature
    probs = torch.softmax(scaled, dim=-1)
    if 0 < params.top_k < probs.shape[-1]:
        probs = _keep_from(probs, _top_k_thresholds(probs, params.top_k))
    if params.top_p < 1.0:
        probs = _keep_from(probs, _nucleus_thresholds(probs, params.top_p))
    if params.min_p > 0.0:
        probs = _keep_from(probs, params.min_p * probs.amax(dim=-1, keepdim=True))
    return probs


def on_host(tensor: torch.Tensor) -> bool:
    """Whether reading a number of it costs nothing; elsewhere it costs a wait, and arithmetic next to nothing."""
    return tensor.device.type == "cpu"


def lazy_laws(logits: torch.Tensor, params: SamplingParams) -> Callable[[int], torch.Tensor]:
    """The law [vocab] of a row of adjusted logits [R, vocab], by its index.

    On a CPU it is worked out when asked for, since the rows behind a rejection are not needed; on other devices all
    rows together, which is one small kernel instead of many.
    """
    if on_host(logits):
        return cache(lambda row: law(logits[row : row + 1], params)[0])
    return law(logits, params).__getitem__


def likeliest(logits: torch.Tensor) -> list[int]:
    """Each row's argmax; the lowest id of equal ones. On a CPU NumPy's, which takes 4 us for 49,152, not 40."""
    if on_host(logits):
        choices: list[int] = logits.numpy().argmax(axis=-1).tolist()
        return choices
    return logits.argmax(dim=-1).tolist()


def finite_rows(logits: torch.Tensor) -> list[bool]:
    """Whether each row's largest logit [R, vocab] is a number; NaN counts as the largest, single -inf are allowed."""
    if on_host(logits):  # NumPy's: 10 us for 49,152, not 60
        finite: list[bool] = np.isfinite(logits.numpy().max(axis=-1)).tolist()
        return finite
    return logits.amax(dim=-1).isfinite().tolist()


def draw(probs: torch.Tensor, u: float) -> int:
    """The index that a uniform `u` in [0, 1) picks from weights [vocab] (normalised or not), by inverse CDF.

    The sum runs in float64: in float32 the error of 49,152 additions would shift probabilities by up to 1e-4.
    """
    cumulative = probs.to(torch.float64).cumsum(dim=0)
    if not float(cumulative[-1]) > 0.0:
        raise ValueError("there is no token to draw: all are banned, or the logits are not finite")
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    if index < len(probs):
        return index
    return int(probs.nonzero()[-1])  # u * total was rounded up to the total


def top_law(probs: torch.Tensor, size: int) -> SparseLaw:
    """The `size` most probable tokens of a law [vocab], renormalised in float32; fewer where the rest has none."""
    return top_laws(probs[None], size)[0]


def top_laws(probs: torch.Tensor, size: int) -> list[SparseLaw]:
    """`top_law` of each row of laws [R, vocab]."""
    top = probs.topk(min(size, probs.shape[-1]))
    return [_law_of(*pair) for pair in zip(top.values.cpu().numpy(), top.indices.cpu().numpy(), strict=True)]


def _law_of(values: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> SparseLaw:
    possible = values > 0.0
    kept = values[possible]
    return SparseLaw(ids[possible].astype(np.uint32), kept / kept.sum(dtype=np.float32))


def _keep_from(probs: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    kept = torch.where(probs >= threshold, probs, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _top_k_thresholds(probs: torch.Tensor, top_k: int) -> torch.Tensor:
    """The top_k-th largest probability of each row [R, vocab], as [R, 1]."""
    if on_host(probs):
        return _per_row(probs, lambda row: _top_k_threshold(row, top_k))
    return probs.topk(top_k, dim=-1).values[:, -1:]


def _nucleus_thresholds(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The least probability in each row's smallest set of most probable tokens whose mass reaches top_p, as [R, 1]."""
    if on_host(probs):
        return _per_row(probs, lambda row: _nucleus_threshold(row, top_p))
    ordered = probs.sort(dim=-1, descending=True).values
    mass_ahead = ordered.cumsum(dim=-1) - ordered
    inside = (mass_ahead < top_p).sum(dim=-1, keepdim=True)
    return ordered.gather(1, (inside - 1).clamp_(min=0))


def _per_row(probs: torch.Tensor, threshold: Callable[[npt.NDArray[np.float32]], float]) -> torch.Tensor:
    """`threshold` of each row [vocab] of laws on the host, as [R, 1]."""
    return torch.tensor([[threshold(row)] for row in probs.numpy()])


def _top_k_threshold(probs: npt.NDArray[np.float32], top_k: int) -> float:
    """The top_k-th largest probability."""
    for ordered in _ever_more(probs):
        if len(ordered) >= top_k:
            return float(ordered[top_k - 1])
    raise ValueError(f"fewer than {top_k} probabilities are numbers")


def _nucleus_threshold(probs: npt.NDArray[np.float32], top_p: float) -> float:
    """The least probability in the smallest set of most probable tokens whose mass reaches top_p."""
    for ordered in _ever_more(probs):
        mass_ahead = ordered.cumsum() - ordered
        inside = int(np.count_nonzero(mass_ahead < top_p))
        if inside < len(ordered) or len(ordered) == len(probs):
            return float(ordered[max(inside, 1) - 1])
    raise ValueError("probabilities are not numbers")


def _ever_more(probs: npt.NDArray[np.float32]) -> Iterator[npt.NDArray[np.float32]]:
    """The most probable ones, descending: those near the top first, then more and more, at last all.

    Laws are peaked, so a comparison with the whole row (10 us for 49,152) and a sort of a few dozen mostly do, where a
    sort of the whole takes 4 ms.
    """
    cut = float(probs.max()) * _FIRST_CUT
    while True:
        near = probs[probs >= cut]
        yield -np.sort(-near)
        if len(near) == len(probs) or cut == 0.0:
            return
        cut = cut * _FIRST_CUT if cut > _SMALLEST else 0.0


def _token_counts(
    tokens: Sequence[int], first_prefix: int, rows: int, vocab: int, *, prompt_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: how often each token was generated [R, vocab], and whether it occurs at all [R, vocab]."""
    prefix = torch.tensor(tokens[:first_prefix], dtype=torch.int64)
    generated = torch.bincount(prefix[prompt_length:], minlength=vocab).to(torch.float32).repeat(rows, 1)
    seen = (torch.bincount(prefix, minlength=vocab) > 0).repeat(rows, 1)
    for row in range(1, rows):
        token_id = tokens[first_prefix + row - 1]
        generated[row:, token_id] += 1
        seen[row:, token_id] = True
    return generated, seen
