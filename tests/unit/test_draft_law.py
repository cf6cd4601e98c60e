"""The draft's law on the wire: what is sent is what was sampled from, and nothing malformed gets through."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.draft_law import MalformedDraft, SparseLaw, draw_sparse, pack, unpack
from tandem.engine.sampling import top_law
from tandem.randomness import Purpose, uniform
from tandem.types import Draft, PackedLaw
from tests.toy_models import FALSE_ALARM, misfit, smallest_visible_error

SEEDED = settings(max_examples=100, deadline=None, derandomize=True, database=None)
VOCAB = 20


def sparse(probs: dict[int, float]) -> SparseLaw:
    return SparseLaw(np.array(list(probs), dtype=np.uint32), np.array(list(probs.values()), dtype=np.float32))


def random_law(rng: np.random.Generator, *, vocab_size: int, scale: float = 1.0) -> torch.Tensor:
    return torch.softmax(torch.from_numpy(rng.normal(0, scale, vocab_size).astype(np.float32)), dim=-1)


def drafted(laws: Sequence[SparseLaw]) -> Draft:
    return Draft(tuple(int(law.token_ids[0]) for law in laws), pack(laws))


@SEEDED
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(1, VOCAB), max_size=6))
def test_laws_come_back_from_the_wire_bit_for_bit(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    laws = [top_law(random_law(rng, vocab_size=VOCAB), size) for size in sizes]
    back = unpack(drafted(laws), vocab_size=VOCAB)
    assert back is not None
    for ours, theirs in zip(laws, back, strict=True):
        assert ours.token_ids.tobytes() == theirs.token_ids.tobytes()
        assert ours.probs.tobytes() == theirs.probs.tobytes()


def test_the_packed_form_is_little_endian_and_needs_eight_bytes_an_entry() -> None:
    packed = pack([sparse({7: 0.25, 300: 0.75}), sparse({1: 1.0})])
    assert packed.sizes == struct.pack("<2I", 2, 1)
    assert packed.token_ids == struct.pack("<3I", 7, 300, 1)
    assert packed.probs == struct.pack("<3f", 0.25, 0.75, 1.0)
    assert packed.num_bytes == 4 * 2 + 8 * 3


def test_five_laws_of_fifty_tokens_take_two_kilobytes() -> None:
    law = top_law(random_law(np.random.default_rng(0), vocab_size=1000), 50)
    assert pack([law] * 5).num_bytes == 2020


def test_a_deterministic_draft_has_no_law() -> None:
    assert unpack(Draft((1, 2, 19)), vocab_size=VOCAB) is None


def test_an_empty_draft_is_not_malformed() -> None:
    assert unpack(Draft(()), vocab_size=VOCAB) is None
    assert unpack(Draft((), pack([])), vocab_size=VOCAB) == []


GOOD = drafted([sparse({3: 0.5, 4: 0.5}), sparse({5: 1.0})])
assert GOOD.law is not None


def with_law(drafted_ids: tuple[int, ...] = GOOD.token_ids, /, **changes: bytes) -> Draft:
    """GOOD with some of its law's byte strings exchanged."""
    assert GOOD.law is not None
    return Draft(drafted_ids, replace(GOOD.law, **changes))


def of_one(token_id: int, probs: dict[int, float]) -> Draft:
    return Draft((token_id,), pack([sparse(probs)]))


MALFORMED = {
    "a drafted id outside the vocabulary, without a law": Draft((3, VOCAB)),
    "a drafted id outside the vocabulary, with one": of_one(VOCAB, {VOCAB: 1.0}),
    "the largest id of all": Draft((2**32 - 1,)),
    "a law's id outside the vocabulary": of_one(3, {3: 0.5, VOCAB: 0.5}),
    "sizes cut in the middle of a number": with_law(sizes=GOOD.law.sizes[:-1]),
    "ids cut in the middle of a number": with_law(token_ids=GOOD.law.token_ids[:-1]),
    "probabilities cut in the middle of a number": with_law(probs=GOOD.law.probs[:-2]),
    "an id less than probabilities": with_law(token_ids=GOOD.law.token_ids[:-4]),
    "a probability less than ids": with_law(probs=GOOD.law.probs[:-4]),
    "an entry less than the sizes say": with_law(token_ids=GOOD.law.token_ids[:-4], probs=GOOD.law.probs[:-4]),
    "a law less than drafted tokens": with_law((3, 5, 6)),
    "a law more than drafted tokens": with_law((3,)),
    "a law and no drafted token": with_law(()),
    "no laws at all": with_law(sizes=b"", token_ids=b"", probs=b""),
    "sizes that overflow 32 bits together": with_law(sizes=struct.pack("<2I", 2**32 - 1, 4)),
    "an empty law among others": with_law(sizes=struct.pack("<2I", 3, 0)),
    "a negative probability": of_one(3, {3: 1.5, 4: -0.5}),
    "not a number": of_one(3, {3: 0.5, 4: float("nan")}),
    "infinity": of_one(3, {3: float("inf"), 4: 0.5}),
    "a sum above 1": of_one(3, {3: 0.6, 4: 0.41}),
    "a sum below 1": of_one(3, {3: 0.5, 4: 0.49}),
    "no probability at all": of_one(3, {3: 0.0, 4: 0.0}),
    "a token named twice": with_law(token_ids=struct.pack("<3I", 3, 3, 5)),
    "a drafted token that its law does not name": of_one(6, {3: 0.5, 4: 0.5}),
    "a drafted token of probability zero": of_one(6, {3: 0.5, 4: 0.5, 6: 0.0}),
    "laws in the wrong order": with_law((5, 3)),
}


@pytest.mark.parametrize("draft", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_draft_is_refused(draft: Draft) -> None:
    with pytest.raises(MalformedDraft):
        unpack(draft, vocab_size=VOCAB)


def test_the_draft_that_the_malformed_ones_are_made_from_is_sound() -> None:
    laws = unpack(GOOD, vocab_size=VOCAB)
    assert laws is not None
    assert [law.probs.tolist() for law in laws] == [[0.5, 0.5], [1.0]]


@SEEDED
@given(
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
    sizes=st.binary(max_size=12),
    ids=st.binary(max_size=16),
    probs=st.binary(max_size=16),
)
def test_no_bytes_whatever_raise_anything_else(
    token_ids: tuple[int, ...], sizes: bytes, ids: bytes, probs: bytes
) -> None:
    with contextlib.suppress(MalformedDraft):
        unpack(Draft(token_ids, PackedLaw(sizes, ids, probs)), vocab_size=VOCAB)


@SEEDED
@given(seed=st.integers(0, 2**32), size=st.integers(1, 300), scale=st.sampled_from((0.1, 1.0, 8.0, 60.0)))
def test_the_top_law_holds_the_most_probable_tokens_in_their_proportions(seed: int, size: int, scale: float) -> None:
    probs = random_law(np.random.default_rng(seed), vocab_size=200, scale=scale)
    law = top_law(probs, size)
    assert law.token_ids.dtype == np.uint32
    assert law.probs.dtype == np.float32
    assert len(set(law.token_ids.tolist())) == len(law.token_ids) == min(size, int((probs > 0).sum()))
    assert (law.probs > 0).all()
    assert abs(float(law.probs.sum(dtype=np.float64)) - 1.0) < 1e-5
    chosen = probs.numpy()[law.token_ids.astype(np.int64)]
    left = np.delete(probs.numpy(), law.token_ids.astype(np.int64))
    assert not len(left) or left.max() <= chosen.min()
    np.testing.assert_allclose(law.probs, chosen / chosen.sum(), rtol=1e-5)


def test_a_top_law_leaves_out_what_cannot_be_drawn() -> None:
    law = top_law(torch.tensor([0.0, 0.25, 0.0, 0.75]), 4)
    assert law.token_ids.tolist() == [3, 1]
    assert law.probs.tolist() == [0.75, 0.25]


def test_every_top_law_keeps_the_contract_that_unpack_checks() -> None:
    """At the size of a real vocabulary, whole law included, where float32 sums stray most."""
    rng = np.random.default_rng(3)
    for scale, size in ((0.0, 49_152), (1.0, 49_152), (3.0, 50), (20.0, 1024)):
        law = top_law(random_law(rng, vocab_size=49_152, scale=scale), size)
        token_id = int(law.token_ids[-1])
        assert unpack(Draft((token_id,), pack([law])), vocab_size=49_152) is not None


def test_draws_go_by_exact_intervals_in_the_laws_own_order() -> None:
    law = sparse({9: 0.5, 2: 0.25, 4: 0.25})
    below = np.nextafter
    for u, token_id in ((0.0, 9), (below(0.5, 0), 9), (0.5, 2), (below(0.75, 0), 2), (0.75, 4), (1 - 2.0**-53, 4)):
        assert draw_sparse(law, float(u)) == token_id


def test_a_drawn_token_always_has_probability() -> None:
    law = sparse({9: 1.0, 2: 1e-45})
    assert law.probs[1] > 0
    assert draw_sparse(law, 1 - 2.0**-53) in (9, 2)


@pytest.mark.parametrize(("vocab_size", "size", "scale"), [(10, 10, 1.0), (40, 8, 1.0), (40, 40, 2.0)])
def test_tokens_are_drawn_from_exactly_the_law_that_is_sent(vocab_size: int, size: int, scale: float) -> None:
    """Chi-square of 40,000 draws, one a seed, against the law as it arrives; false alarm 1e-6.

    With at most 40 cells it sees a total-variation error of 0.032.
    """
    num_trials = 40_000
    assert smallest_visible_error(num_cells=40, num_trials=num_trials) < 0.032
    law = top_law(random_law(np.random.default_rng(size), vocab_size=vocab_size, scale=scale), size)
    counts: npt.NDArray[np.int64] = np.zeros(vocab_size, dtype=np.int64)
    for seed in range(num_trials):
        counts[draw_sparse(law, uniform(seed, 17, Purpose.DRAFT))] += 1
    sent = np.zeros(vocab_size)
    arrived = unpack(drafted([law]), vocab_size=vocab_size)
    assert arrived is not None
    sent[arrived[0].token_ids.astype(np.int64)] = arrived[0].probs
    assert misfit(counts, sent / sent.sum()) > FALSE_ALARM
    # The test can fail: a law whose largest share is a quarter smaller does not fit.
    other = np.where(sent == sent.max(), 0.75 * sent, sent)
    assert misfit(counts, other / other.sum()) < FALSE_ALARM
