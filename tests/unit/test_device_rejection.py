"""The rejection rule as a GPU runs it, here on CPU tensors: outcome for outcome what rejection.py says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.draft_law import SparseLaw, draw_sparse
from tandem.engine import device_rejection, rejection, sampling
from tandem.engine.outcome import Outcome
from tandem.engine.rejection import verify
from tandem.engine.sampling import law, top_law
from tandem.randomness import Purpose, uniform
from tandem.types import SamplingParams, TokenOrigin

VOCAB = 40
PARAMS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.4),
    "top_k": SamplingParams(temperature=1.3, top_k=5),
    "top_p": SamplingParams(top_p=0.8),
    "all": SamplingParams(temperature=0.9, top_k=12, top_p=0.95, min_p=0.02),
    "greedy": SamplingParams(temperature=0.0),
}


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the device's branches, whatever the device."""
    for module in (rejection, sampling):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)


def normal_logits(rows: int, *, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32))


def draft(
    logits: torch.Tensor, kind: str, params: SamplingParams, *, seed: int
) -> tuple[list[int], list[SparseLaw] | None]:
    """Drafted tokens and their laws, from a model that differs from `logits` [k + 1, vocab] a little."""
    near = logits[:-1] + 0.5 * normal_logits(len(logits) - 1, seed=seed + 5000)
    if kind == "deterministic" or len(logits) == 1:
        return logits[:-1].topk(2).indices[:, seed % 2].tolist(), None
    sizes = [3 + 7 * i if kind == "sparse" else VOCAB for i in range(len(near))]
    laws = [top_law(probs, size) for probs, size in zip(law(near, params), sizes, strict=True)]
    return [draw_sparse(one, uniform(seed, i, Purpose.DRAFT)) for i, one in enumerate(laws)], laws


@pytest.mark.parametrize("kind", ["dense", "sparse", "deterministic"])
@pytest.mark.parametrize("name", PARAMS)
def test_device_and_host_decide_alike(monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    rounds, seen = [], set()
    for seed in range(120):
        logits = normal_logits(seed % 6 + 1, seed=seed)
        drafted, laws = draft(logits, kind, PARAMS[name], seed=seed)
        rounds.append((logits, drafted, laws, verify(logits, drafted, laws, PARAMS[name], seed=seed, position=0)))
    as_on_a_gpu(monkeypatch)
    for seed, (logits, drafted, laws, expected) in enumerate(rounds):
        assert verify(logits, drafted, laws, PARAMS[name], seed=seed, position=0) == expected
        seen.add(expected.origin)
    assert seen == {TokenOrigin.PLAIN, TokenOrigin.RECOVERED, TokenOrigin.BONUS}


@pytest.mark.parametrize("name", PARAMS)
def test_device_and_host_make_the_same_laws(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    logits = normal_logits(50, seed=1)
    logits[::2] = (logits[::2] * 2).round() / 2  # ties
    expected = law(logits, PARAMS[name])
    as_on_a_gpu(monkeypatch)
    torch.testing.assert_close(law(logits, PARAMS[name]), expected, rtol=1e-5, atol=1e-7)


def test_a_rejection_by_rounding_alone_still_answers_from_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's law is nowhere below the target's: nothing is left of p - q."""
    as_on_a_gpu(monkeypatch)
    numbers = {Purpose.ACCEPT: 1.0 - 2.0**-53, Purpose.TARGET: 0.3}
    monkeypatch.setattr(rejection, "uniform", lambda seed, position, purpose: numbers[purpose])
    p = np.array([0.125, 0.375, 0.5], dtype=np.float32)
    above = SparseLaw(np.arange(3, dtype=np.uint32), p * np.float32(1.0005))
    logits = torch.log(torch.from_numpy(np.stack([p, p])))
    outcome = verify(logits, [0], [above], SamplingParams(), seed=0, position=0)
    assert outcome == Outcome(0, 1, TokenOrigin.RECOVERED)


def test_the_largest_number_picks_the_last_token_that_has_a_weight() -> None:
    probs = torch.tensor([[0.25, 0.75, 0.0, 0.0]])
    assert device_rejection.accept(probs, [], None, accept_uniforms=[], target_uniforms=[1.0]) == (0, 1)
    assert device_rejection.accept(probs, [], None, accept_uniforms=[], target_uniforms=[0.0]) == (0, 0)


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_where_nothing_can_be_drawn_that_is_an_error_and_not_some_token(value: float) -> None:
    with pytest.raises(ValueError, match="no token to draw"):
        device_rejection.accept(torch.full((2, 3), value), [1], None, accept_uniforms=[0.5], target_uniforms=[0.5, 0.5])


def test_a_token_of_a_large_vocabulary_survives_the_copy() -> None:
    probs = torch.zeros(1, 262_144)
    probs[0, 262_143] = 1.0
    assert device_rejection.accept(
        probs.repeat(2, 1), [262_143], None, accept_uniforms=[0.9], target_uniforms=[0.9, 0.9]
    ) == (1, 262_143)


class _Reads(TorchDispatchMode):
    """Counts single numbers that are read; lists are read past it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", PARAMS)
def test_one_list_comes_back_and_no_single_number(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    logits = normal_logits(6, seed=3)
    drafted, laws = draft(logits, "sparse", PARAMS[name], seed=3)
    as_on_a_gpu(monkeypatch)
    lists: list[int] = []
    tolist = torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        lists.append(tensor.numel())
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    with _Reads() as reads:
        verify(logits, drafted, laws, PARAMS[name], seed=3, position=0)
    assert reads.count == 0
    assert lists == [6 if PARAMS[name].greedy else 3]
