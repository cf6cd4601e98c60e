"""The table of n-grams: learned from laws, written, read, and looked up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.distill.ngrams import hits, learn
from tandem.errors import InvalidRequest, OutOfStep
from tandem.lookup.drafter import LookupDrafter
from tandem.ngram_table import Contexts, NgramTable, Origin
from tandem.types import DraftWish, SamplingParams, SessionStart
from tests.toy_tables import example

ORIGIN = Origin(model_id="toy", tokenizer_fingerprint="f" * 64, vocab_size=50, num_answer_tokens=9)


def start(token_ids: tuple[int, ...]) -> SessionStart:
    return SessionStart(
        token_ids=token_ids, prompt_length=len(token_ids), sampling=SamplingParams(temperature=0.0), seed=0
    )


def approximately(*law: tuple[int, float]) -> list[tuple[int, Any]]:
    """Shares are stored in 255ths."""
    return [(token, pytest.approx(share, abs=0.004)) for token, share in law]


def test_a_longer_context_counts_by_how_often_it_was_seen_and_shorter_ones_as_two_places() -> None:
    answers = [example([1, 2], [3, 9]), example([5, 2], [4, 9]), example([6, 2], [4, 9])]
    table = learn(answers, origin=ORIGIN)
    after_2 = approximately((4, 3 / 5 * 2 / 3), (3, 3 / 5 * 1 / 3))
    assert table.law([2]) == table.law([0, 7, 2]) == after_2
    assert table.law([0, 1, 2]) == approximately((3, 1 / 3 + 2 / 3 * 1 / 5), (4, 2 / 3 * 2 / 5))
    assert table.law([1, 30]) == table.law([]) == []


def test_long_contexts_that_were_seen_once_are_left_out() -> None:
    answers = [example([1, 2, 3], [4]), example([5, 2, 3], [6])]
    assert learn(answers, origin=ORIGIN).num_contexts == 2  # "3" and "2 3"
    assert learn([*answers, example([1, 2, 3], [4])], origin=ORIGIN).num_contexts == 3
    assert learn(answers, origin=ORIGIN, longest=1).longest == 1


def test_laws_count_and_not_the_tokens_drawn_from_them() -> None:
    law = {3: 0.5, 4: 0.4}
    table = learn([example([1, 2], [4], [law]), example([1, 2], [4], [law])], origin=ORIGIN, longest=1)
    assert table.law([2]) == approximately((3, 0.25), (4, 0.2))


def test_a_plain_count_says_the_same() -> None:
    """Against dictionaries, on random answers over few tokens."""
    rng = np.random.default_rng(0)
    examples = [example(rng.integers(0, 6, 5).tolist(), rng.integers(0, 6, 60).tolist()) for _ in range(40)]
    table = learn(examples, origin=ORIGIN)
    counts: dict[tuple[int, ...], Counter[int]] = {}
    for one in examples:
        tokens = one.token_ids.tolist()
        for place in range(one.prompt_length, len(tokens)):
            for n in range(1, 5):
                counts.setdefault(tuple(tokens[place - n : place]), Counter())[tokens[place]] += 1
    contexts = [context for context in counts if len(context) == 4]
    for context in contexts:
        expected: dict[int, float] = {}
        for n in range(1, 5):
            said = counts[context[-n:]]
            if n > 2 and said.total() < 2:
                break
            kept = {token: count / said.total() for token, count in said.items() if count / said.total() >= 0.02}
            weight = said.total() / (said.total() + 2)
            expected = {token: share * (1 - weight) for token, share in expected.items()}
            for token, share in kept.items():
                expected[token] = expected.get(token, 0) + weight * share
        assert dict(table.law([17, *context])) == pytest.approx(expected, abs=0.01)
    assert len(contexts) > 200
    assert 0 < sum(hits(table, one) for one in examples) <= sum(len(one.top_ids) for one in examples)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    table = learn([example([1, 2], [3, 9]), example([5, 2], [4, 9])], origin=ORIGIN)
    table.save(tmp_path / "t.safetensors")
    again = NgramTable.load(tmp_path / "t.safetensors")
    assert again.origin == ORIGIN
    for tokens in ([1, 2], [5, 2], [2], [3], [30]):
        assert again.law(tokens) == table.law(tokens)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda one: replace(one, keys=one.keys[::-1].copy()), "not in order"),
        (lambda one: replace(one, counts=one.counts[1:]), "not complete"),
        (lambda one: replace(one, shares=one.shares[1:]), "the tokens they should"),
        (lambda one: replace(one, token_ids=one.token_ids + np.uint32(50)), "outside its vocabulary"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[Contexts], Contexts], what: str) -> None:
    whole = Contexts(
        keys=np.array([1, 5], dtype=np.uint32),
        counts=np.array([1, 1], dtype=np.uint8),
        sizes=np.array([1, 2], dtype=np.uint8),
        token_ids=np.array([3, 4, 5], dtype=np.uint32),
        shares=np.array([255, 200, 55], dtype=np.uint8),
    )
    path = tmp_path / "t.safetensors"
    NgramTable([whole], ORIGIN).save(path)
    assert NgramTable.load(path).num_contexts == 2
    NgramTable([damage(whole)], ORIGIN).save(path)
    with pytest.raises(InvalidRequest, match=what):
        NgramTable.load(path)


@pytest.mark.parametrize("content", [b"", b"no safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"t\.safetensors") as caught:
        NgramTable.load(path)
    assert caught.value.param == "table"


def test_a_draft_goes_on_until_it_is_too_unsure() -> None:
    table = learn([example([1], [2, 3, 4, 5], [{2: 0.5}, {3: 0.5}, {4: 0.5}, {5: 0.5}])] * 8, origin=ORIGIN)

    async def drafted(least_certainty: float, num_draft_tokens: int) -> tuple[int, ...]:
        session = LookupDrafter(min_match=None, table=table, least_certainty=least_certainty).open(start((1,)))
        return (await session.propose(1, (), DraftWish(num_draft_tokens))).draft.token_ids

    assert asyncio.run(drafted(0.0, 9)) == (2, 3, 4, 5)
    assert asyncio.run(drafted(0.0, 2)) == (2, 3)
    assert asyncio.run(drafted(0.1, 9)) == (2, 3)  # 0.4, and 0.8 * 0.5 + 0.2 * 0.4; no third one
    assert asyncio.run(drafted(0.6, 9)) == ()


def test_a_session_follows_its_text() -> None:
    table = learn([example([1], [2, 3, 4]), example([8], [9, 7])], origin=ORIGIN)

    async def go() -> None:
        session = LookupDrafter(min_match=None, table=table, least_certainty=0.0).open(start((0, 1)))
        assert (await session.propose(2, (), DraftWish(2))).draft.token_ids == (2, 3)
        assert session.length == 4
        assert (await session.propose(3, (8,), DraftWish(4))).draft.token_ids == (
            9,
            7,
        )  # 2 stood, 8 came in the place of 3
        assert (await session.propose(3, (8,), DraftWish(4))).draft.token_ids == (9, 7)  # repeated: harmless
        with pytest.raises(OutOfStep):
            await session.propose(99, (), DraftWish(1))
        session.close()
        assert session.length == 0

    asyncio.run(go())


def test_of_text_and_table_the_likelier_one_guesses() -> None:
    """After 1 the table says 2, quite surely; the text said 3 there. After 3 and 2 only the text knows more."""
    table = learn([example([1], [2], [{2: 0.9}])] * 9, origin=ORIGIN)

    async def drafted(*tokens: int) -> tuple[int, ...]:
        session = LookupDrafter(table=table, least_certainty=0.0).open(start(tokens))
        return (await session.propose(len(tokens), (), DraftWish(3))).draft.token_ids

    assert asyncio.run(drafted(5, 1)) == (2,)  # of a text that says nothing
    assert asyncio.run(drafted(1, 3, 4, 1)) == (2,)  # a match of one token is less sure
    assert asyncio.run(drafted(1, 3, 2, 7, 8, 1)) == (2, 7, 8)  # and then the text goes on from the table's word
    longest = (*range(10, 30), 1, 3, 4, *range(10, 30), 1)  # a match of 21 tokens is surer
    assert asyncio.run(drafted(*longest)) == (3, 4, 10)
