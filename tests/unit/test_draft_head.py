"""Draft heads: the file, what it computes on either engine, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.draft_head import RMS_EPSILON, DraftHeadWeights, RoundedMatrix
from tandem.engine.draft_head import TorchDraftHead, read_draft_head
from tandem.engine.openvino_head import OpenVinoDraftHead
from tandem.errors import InvalidRequest
from tandem.types import ModelInfo
from tests.toy_heads import FINGERPRINT, random_head

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Array = npt.NDArray[np.float64]


def model_info(fingerprint: str = FINGERPRINT) -> ModelInfo:
    return ModelInfo(
        model_id="served",
        revision="",
        vocab_size=50,
        tokenizer_fingerprint=fingerprint,
        context_length=64,
        device="cpu",
        dtype="float32",
        engine="torch",
    )


def law_by_hand(head: DraftHeadWeights, state: Array, token_id: int) -> Array:
    """The formula of tandem/draft_head.py in float64, for one token."""

    def rms(values: Array) -> Array:
        normed: Array = values / np.sqrt((values**2).mean() + RMS_EPSILON)
        return normed

    known = head.token_ids.tolist()
    row = known.index(token_id) if token_id in known else len(known)
    token = head.tokens.dense().astype(np.float64)[row]
    hidden = head.from_state.dense() @ rms(state) + head.from_token.dense() @ token
    seen = np.concatenate([rms(hidden), token])
    gate = head.gate.dense() @ seen
    hidden = hidden + head.down.dense() @ (gate / (1.0 + np.exp(-gate)) * (head.up.dense() @ seen))
    logits = head.out.dense() @ rms(hidden)
    law: Array = np.exp(logits - logits.max())
    law /= law.sum()
    return law


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_laws_are_the_formula_s_likeliest_first(engine: str) -> None:
    head = random_head()
    computing = (
        TorchDraftHead(head, device=torch.device("cpu")) if engine == "torch" else OpenVinoDraftHead(head, threads=1)
    )
    states = np.random.default_rng(1).normal(size=(4, 12))
    tokens = [3, 20, 7, 0]  # the last two it does not know
    laws = computing.laws(torch.from_numpy(states.astype(np.float32)), tokens)
    tolerance = 1e-5 if engine == "torch" else 0.02  # OpenVINO rounds what is multiplied to 8 bits
    for law, state, token_id in zip(laws, states, tokens, strict=True):
        expected = law_by_hand(head, state, token_id)
        assert sorted(law.token_ids.tolist()) == head.token_ids.tolist()
        assert (np.diff(law.probs) <= 0.0).all()
        by_id = dict(zip(law.token_ids.tolist(), law.probs.tolist(), strict=True))
        assert [by_id[token] for token in head.token_ids.tolist()] == pytest.approx(expected, abs=tolerance)
    again = computing.laws(torch.from_numpy(states[:1].astype(np.float32)), tokens[:1])
    assert again[0].probs == pytest.approx(laws[0].probs, abs=tolerance)
    assert laws[1].probs == pytest.approx(np.sort(law_by_hand(head, states[1], 20))[::-1], abs=tolerance), "kept safe"


def test_of_many_tokens_the_likeliest_are_named() -> None:
    head = random_head(token_ids=tuple(range(5, 105)))
    (law,) = TorchDraftHead(head, device=torch.device("cpu")).laws(torch.ones(1, 12), [5])
    expected = law_by_hand(head, np.ones(12), 5)
    assert law.probs == pytest.approx(np.sort(expected)[::-1][:32], abs=1e-5)
    assert law.token_ids[0] == 5 + int(expected.argmax())
    assert float(law.probs.sum()) < 1.0


def test_rows_are_rounded_to_a_127th_of_their_largest() -> None:
    matrix = np.random.default_rng(0).normal(size=(7, 9)).astype(np.float32)
    matrix[3] = 0.0
    rounded = RoundedMatrix.of(matrix)
    step = np.abs(matrix).max(axis=1, keepdims=True) / 127
    assert (np.abs(rounded.dense() - matrix) <= step * 0.5 + 1e-7).all()
    assert rounded.values.dtype == np.int8


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    head = random_head()
    head.save(tmp_path / "head")
    read = read_draft_head(tmp_path / "head", model=model_info(), state_width=12)
    assert read.origin == head.origin
    assert read.token_ids.tolist() == head.token_ids.tolist()
    for name in ("tokens", "from_state", "from_token", "gate", "up", "down", "out"):
        assert np.array_equal(getattr(read, name).dense(), getattr(head, name).dense())


Spoil = Callable[[DraftHeadWeights], DraftHeadWeights]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda head: replace(head, token_ids=head.token_ids[::-1].copy()), "its tokens are not in order"),
        (lambda head: replace(head, out=RoundedMatrix(head.out.values[:-1], head.out.scales[:-1])), "out is"),
        (lambda head: replace(head, gate=head.down), "gate is"),
        (lambda head: replace(head, up=RoundedMatrix(head.up.values, head.up.scales[:-1])), "up has other scales"),
        (
            lambda head: replace(head, out=RoundedMatrix(head.out.values, head.out.scales * np.nan)),
            "out has other scales",
        ),
        (
            lambda head: replace(head, down=RoundedMatrix(head.down.values.astype(np.int16), head.down.scales)),
            "down is no matrix of 8 bits",
        ),
    ],
)
def test_a_damaged_head_is_named(tmp_path: Path, spoil: Spoil, says: str) -> None:
    spoil(random_head()).save(tmp_path / "head")
    with pytest.raises(InvalidRequest, match=says) as refused:
        DraftHeadWeights.load(tmp_path / "head")
    assert refused.value.param == "draft_head"


@pytest.mark.parametrize(
    ("fingerprint", "width", "says"),
    [("e" * 64, 12, "tokenizer"), (FINGERPRINT, 13, "states of 12 numbers, the target's have 13")],
)
def test_another_target_s_head_is_refused(tmp_path: Path, fingerprint: str, width: int, says: str) -> None:
    random_head().save(tmp_path / "head")
    with pytest.raises(InvalidRequest, match=says):
        read_draft_head(tmp_path / "head", model=model_info(fingerprint), state_width=width)


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no head")
    with pytest.raises(InvalidRequest, match="cannot be read as a draft head"):
        DraftHeadWeights.load(tmp_path / "text")
    with pytest.raises(InvalidRequest, match="cannot be read as a draft head"):
        DraftHeadWeights.load(tmp_path / "nowhere")
