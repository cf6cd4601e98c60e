"""The table of n-grams: learned from laws, written, read, and looked up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from draft_service.drafters.lookup import LookupDrafter
from tandem.distill.asked import Asked
from tandem.distill.dataset import Example
from tandem.distill.ngrams import hits, learn
from tandem.errors import InvalidRequest, OutOfStep
from tandem.ngram_table import NgramTable, Origin
from tandem.types import SamplingParams, SessionStart

ORIGIN = Origin(model_id="toy", tokenizer_fingerprint="f" * 64, vocab_size=50, num_answer_tokens=9)
ASKED = Asked(key="0", category="toy", messages=(), validation=False, temperature=0.0, max_tokens=9)


def start(token_ids: tuple[int, ...]) -> SessionStart:
    return SessionStart(token_ids=token_ids, prompt_length=len(token_ids), sampling=SamplingParams(), seed=0)


def example(prompt: list[int], answer: list[int], laws: list[dict[int, float]] | None = None) -> Example:
    """An answer whose laws are `laws`, or one-hot at its tokens."""
    given = laws or [{token: 1.0} for token in answer]
    top_ids = [[*law, *(40 + i for i in range(4 - len(law)))] for law in given]
    probs = [[*law.values(), *([1e-6] * (4 - len(law)))] for law in given]
    return Example(
        asked=ASKED,
        token_ids=np.array(prompt + answer, dtype=np.int32),
        prompt_length=len(prompt),
        top_ids=np.array(top_ids, dtype=np.int32),
        top_log_probs=np.log(np.array(probs)).astype(np.float16),
    )


def test_the_longest_known_context_decides() -> None:
    table = learn([example([1, 2], [3, 9]), example([5, 2], [4, 9]), example([6, 2], [4, 9])], origin=ORIGIN)
    assert table.next([0, 1, 2]) == pytest.approx((3, 1 / 2), abs=0.003)  # seen once, and 4 after 2 counts as once
    assert table.next([0, 7, 2]) == pytest.approx((4, 2 / 3), abs=0.003)
    assert table.next([2]) == pytest.approx((4, 2 / 3), abs=0.003)
    assert table.next([1, 30]) is None
    assert table.next([]) is None


def test_contexts_that_say_what_shorter_ones_say_are_left_out() -> None:
    answers = [example([1, 2], [4]), example([5, 2], [4]), example([6, 2], [4])]
    assert learn(answers, origin=ORIGIN).num_contexts == 1
    assert learn([*answers, example([7, 2], [3])], origin=ORIGIN).num_contexts == 2


def test_laws_count_and_not_the_tokens_drawn_from_them() -> None:
    law = {3: 0.5, 4: 0.4}
    table = learn([example([1, 2], [4], [law]), example([1, 2], [4], [law])], origin=ORIGIN)
    assert table.next([2]) == pytest.approx((3, 0.5), abs=0.003)


def test_a_plain_count_says_the_same() -> None:
    """Against dictionaries, on random answers over few tokens: a shorter context counts as one more place."""
    rng = np.random.default_rng(0)
    examples = [example(rng.integers(0, 6, 5).tolist(), rng.integers(0, 6, 60).tolist()) for _ in range(40)]
    table = learn(examples, origin=ORIGIN)
    counts: dict[tuple[int, ...], dict[int, float]] = {}
    for one in examples:
        tokens = one.token_ids.tolist()
        for place in range(one.prompt_length, len(tokens)):
            for n in range(1, 5):
                said = counts.setdefault(tuple(tokens[place - n : place]), {})
                said[tokens[place]] = said.get(tokens[place], 0) + 1
    expected: dict[tuple[int, ...], tuple[int, float]] = {}
    clear = 0
    for context in sorted(counts, key=len):
        scores = dict(counts[context])
        if len(context) > 1:
            token, certainty = expected[context[1:]]
            scores[token] = scores.get(token, 0) + certainty
        best = max(scores, key=scores.__getitem__)
        expected[context] = best, scores[best] / (sum(counts[context].values()) + (len(context) > 1))
        guess = table.next([17, *context])
        assert guess is not None
        expected[context] = guess  # of near equals either may be the larger after rounding to 255ths
        if max(scores.values()) - sorted([0, *scores.values()])[-2] > 0.05:
            clear += 1
            assert guess[0] == best
    assert clear > 200
    assert 0 < sum(hits(table, one) for one in examples) <= sum(len(one.top_ids) for one in examples)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    table = learn([example([1, 2], [3, 9]), example([5, 2], [4, 9])], origin=ORIGIN)
    table.save(tmp_path / "t.safetensors")
    again = NgramTable.load(tmp_path / "t.safetensors")
    assert again.origin == ORIGIN
    for tokens in ([1, 2], [5, 2], [2], [3], [30]):
        assert again.next(tokens) == table.next(tokens)


@pytest.mark.parametrize("content", [b"", b"no safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"t\.safetensors") as caught:
        NgramTable.load(path)
    assert caught.value.param == "table"


def test_a_draft_goes_on_until_it_is_too_unsure() -> None:
    table = learn(
        [example([1], [2, 3, 4, 5], [{2: 0.5}, {3: 0.5}, {4: 0.5}, {5: 0.5}])],
        origin=ORIGIN,
    )

    async def drafted(least_certainty: float, num_draft_tokens: int) -> tuple[int, ...]:
        session = LookupDrafter(min_match=None, table=table, least_certainty=least_certainty).open(start((1,)))
        return (await session.propose(1, (), num_draft_tokens)).draft.token_ids

    assert asyncio.run(drafted(0.0, 9)) == (2, 3, 4, 5)
    assert asyncio.run(drafted(0.0, 2)) == (2, 3)
    assert asyncio.run(drafted(0.2, 9)) == (2, 3)
    assert asyncio.run(drafted(0.6, 9)) == ()


def test_a_session_follows_its_text() -> None:
    table = learn([example([1], [2, 3, 4]), example([8], [9, 7])], origin=ORIGIN)

    async def go() -> None:
        session = LookupDrafter(min_match=None, table=table, least_certainty=0.0).open(start((0, 1)))
        assert (await session.propose(2, (), 2)).draft.token_ids == (2, 3)
        assert session.length == 4
        assert (await session.propose(3, (8,), 4)).draft.token_ids == (9, 7)  # 2 stood, 8 came in the place of 3
        assert (await session.propose(3, (8,), 4)).draft.token_ids == (9, 7)  # repeated: harmless
        with pytest.raises(OutOfStep):
            await session.propose(99, (), 1)
        session.close()
        assert session.length == 0

    asyncio.run(go())


def test_of_text_and_table_the_likelier_one_guesses() -> None:
    """After 1 the table says 2, quite surely; the text said 3 there. After 3 and 2 only the text knows more."""
    table = learn([example([1], [2], [{2: 0.9}])], origin=ORIGIN)

    async def drafted(*tokens: int) -> tuple[int, ...]:
        session = LookupDrafter(table=table, least_certainty=0.0).open(start(tokens))
        return (await session.propose(len(tokens), (), 3)).draft.token_ids

    assert asyncio.run(drafted(5, 1)) == (2,)  # of a text that says nothing
    assert asyncio.run(drafted(1, 3, 4, 1)) == (2,)  # a match of one token is less sure
    assert asyncio.run(drafted(1, 3, 2, 7, 8, 1)) == (2, 7, 8)  # and then the text goes on from the table's word
    longest = (*range(10, 30), 1, 3, 4, *range(10, 30), 1)  # a match of 21 tokens is surer
    assert asyncio.run(drafted(*longest)) == (3, 4, 10)
