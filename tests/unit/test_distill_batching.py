"""Answers generated in batches: what plain decoding says, with the target's law at each token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tandem.distill.answers import Agenda
from tandem.distill.asked import Asked
from tandem.distill.batching import Continuation, Prompt, continuations, loops
from tests.toy_models import ToyModel, ToyRunner

VOCAB = 20
TOP = 6
END = 3


def generated(
    runner: ToyRunner, prompts: Sequence[Prompt], *, batch_size: int = 4, ends: frozenset[int] = frozenset()
) -> dict[int, Continuation]:
    waiting = iter(prompts)
    found = continuations(
        runner,
        lambda: next(waiting, None),
        end_token_ids=ends,
        batch_size=batch_size,
        step_tokens=16,
        top=TOP,
        stop=lambda: False,
    )
    return {continuation.prompt.tag: continuation for continuation in found}


def prompt(index: int, *, temperature: float = 0.0, max_tokens: int = 12) -> Prompt:
    token_ids = np.random.default_rng(index).integers(0, VOCAB, 1 + index % 7).tolist()
    return Prompt(token_ids=token_ids, temperature=temperature, seed=index, max_tokens=max_tokens, tag=index)


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_greedy_answers_and_their_laws_are_those_of_plain_decoding(batch_size: int) -> None:
    model = ToyModel(vocab_size=VOCAB, seed=0)
    prompts = [prompt(index, max_tokens=5 + index % 9) for index in range(20)]
    found = generated(ToyRunner(model, num_blocks=40), prompts, batch_size=batch_size)
    assert sorted(found) == list(range(20))
    for one in prompts:
        continuation, text = found[one.tag], list(one.token_ids)
        assert continuation.token_ids == model.greedy(text, one.max_tokens)
        for token_id, ids, log_probs in zip(
            continuation.token_ids, continuation.top_ids, continuation.top_log_probs, strict=True
        ):
            law = model.logits(text).log_softmax(-1)
            values, expected = law.sort(descending=True, stable=True)
            assert ids.tolist() == expected[:TOP].tolist()
            np.testing.assert_allclose(log_probs, values[:TOP].numpy(), atol=2e-2)
            text.append(token_id)


def test_an_answer_ends_with_its_end_token() -> None:
    model = ToyModel(vocab_size=VOCAB, seed=0)
    prompts = [prompt(index, max_tokens=40) for index in range(30)]
    found = generated(ToyRunner(model, num_blocks=400), prompts, ends=frozenset({END}))
    ended = 0
    for one in prompts:
        plain = model.greedy(one.token_ids, 40)
        until = plain.index(END) + 1 if END in plain else 40
        said = found[one.tag].token_ids
        assert said == plain[: len(said)]
        assert len(said) == until or loops(said)
        ended += said[-1] == END
    assert ended > 3


def test_sampled_answers_follow_the_law_and_do_not_depend_on_the_batch() -> None:
    """2,000 first tokens at temperature 0.7; total variation from the law is below 0.08 but in 1 of 10,000 runs."""
    model = ToyModel(vocab_size=VOCAB, seed=0)
    many = [Prompt(token_ids=[1, 2], temperature=0.7, seed=seed, max_tokens=1, tag=seed) for seed in range(2000)]
    found = generated(ToyRunner(model), many, batch_size=32)
    counts = np.bincount([found[one.tag].token_ids[0] for one in many], minlength=VOCAB) / len(many)
    law = (model.logits([1, 2]) / 0.7).softmax(-1).numpy()
    assert float(np.abs(counts - law).sum() / 2) < 0.08
    alone = generated(ToyRunner(model), many[:50], batch_size=1)
    assert all(alone[tag].token_ids == found[tag].token_ids for tag in alone)


def test_blocks_bound_what_runs_at_once_and_all_are_answered() -> None:
    model = ToyModel(vocab_size=VOCAB, seed=1)
    prompts = [prompt(index) for index in range(12)]
    runner = ToyRunner(model, num_blocks=7)
    assert len(generated(runner, prompts, batch_size=8)) == 12
    assert max(batch.num_sequences for batch in runner.batches) in (1, 2)


def test_it_stops_when_told_to() -> None:
    runner = ToyRunner(ToyModel(vocab_size=VOCAB, seed=0), num_blocks=400)
    prompts = (prompt(index) for index in itertools.count())
    found = continuations(
        runner,
        lambda: next(prompts),
        end_token_ids=frozenset(),
        batch_size=4,
        step_tokens=64,
        top=TOP,
        stop=lambda: runner.num_forwards >= 30,
    )
    assert len(list(found)) == pytest.approx(8, abs=2)
    assert runner.num_forwards == 30


def test_the_law_is_sampled_at_all_its_length() -> None:
    """Tokens beyond the top ones are drawn too."""
    model = ToyModel(vocab_size=VOCAB, seed=0, scale=0.1)
    many = [Prompt(token_ids=[1], temperature=1.0, seed=seed, max_tokens=1, tag=seed) for seed in range(400)]
    found = generated(ToyRunner(model), many, batch_size=32)
    assert len({continuation.token_ids[0] for continuation in found.values()}) == VOCAB


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([1, 2] * 12, True),
        ([1, 2] * 11, False),
        ([9] * 24, True),
        (list(range(40)) * 3, True),
        (list(range(41)) * 3, False),
        (list(range(100)), False),
        ([7, 7, 7, *[1, 2, 3] * 8], True),
        ([], False),
    ],
)
def test_loops_are_seen(token_ids: list[int], *, expected: bool) -> None:
    assert loops(token_ids) is expected


def asked(key: str, *, later_turns: tuple[str, ...] = ()) -> Asked:
    return Asked(
        key=key,
        category="tests",
        messages=({"role": "user", "content": key},),
        validation=False,
        temperature=0.0,
        max_tokens=4,
        later_turns=later_turns,
    )


def test_an_agenda_asks_what_follows_first_and_nothing_twice() -> None:
    first, second = asked("a", later_turns=("and?",)), asked("b")
    agenda = Agenda(iter([first, second, asked("c")]))
    assert agenda.next() == first
    agenda.answered(first, "so")
    following = agenda.next()
    assert following is not None
    assert following.key == "a+"
    taken_up = Agenda(iter([first, second, asked("c")]))
    taken_up.answered(first, "so")
    taken_up.answered(following, "that is why")
    taken_up.answered(second, "well")
    remaining = taken_up.next()
    assert remaining is not None
    assert remaining.key == "c"
    assert taken_up.next() is None


def test_equal_logits_give_the_lowest_id() -> None:
    model = ToyModel(vocab_size=VOCAB, seed=0)
    model.table = torch.zeros_like(model.table)
    found = generated(ToyRunner(model), [prompt(0, max_tokens=3)])
    assert found[0].token_ids == [0, 0, 0]
