"""What the target is asked: the same for a seed, nothing twice, and the held-out side apart."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tandem.distill.asked import Asked
from tandem.distill.follow_ups import FollowUps
from tandem.distill.own_prompts import own_prompts
from tandem.distill.starters import words
from tandem.distill.starters.filling import Filler
from tandem.distill.starters.make import starters

COUNT = 4000


@pytest.fixture(scope="module")
def some() -> list[Asked]:
    return list(itertools.islice(starters(7), COUNT))


def test_a_seed_gives_the_same_starters_and_another_seed_others(some: list[Asked]) -> None:
    assert list(itertools.islice(starters(7), 50)) == some[:50]
    others = {one.messages for one in map(_hashable, itertools.islice(starters(8), 500))}
    assert len(others & {one.messages for one in map(_hashable, some[:500])}) < 25


def _hashable(asked: Asked) -> Asked:
    return replace(asked, messages=tuple(tuple(message.items()) for message in asked.messages))  # type: ignore[misc]


def test_no_starter_comes_twice(some: list[Asked]) -> None:
    assert len({one.key for one in some}) == COUNT
    assert len({json.dumps(one.messages) for one in some}) == COUNT


def test_every_kind_is_there_and_no_slot_is_left_open(some: list[Asked]) -> None:
    kinds = Counter(one.category for one in some)
    assert len(kinds) == 12
    assert min(kinds.values()) > 40
    for one in some:
        text = one.messages[-1]["content"] + "".join(one.later_turns)
        assert "{" not in text.replace("{}", ""), text
        assert "\\n" not in text


def test_held_out_starters_are_about_held_out_subjects(some: list[Asked]) -> None:
    held_out = set(words.SUBJECTS[::12])
    of_validation = [one.messages[-1]["content"] for one in some if one.validation]
    of_training = [one.messages[-1]["content"] for one in some if not one.validation]
    assert len(of_validation) == pytest.approx(COUNT / 40, rel=0.2)
    assert not [text for text in of_training for subject in held_out if f" {subject}" in text]
    others = set(words.SUBJECTS) - held_out
    # "the moons of Jupiter" also stands in longer subjects and in templates; whole subjects only.
    found = [text for text in of_validation for subject in others if text.endswith(f"about {subject}.")]
    assert not found


def test_slots_are_filled_as_the_template_says() -> None:
    filler = Filler(np.random.default_rng(0), validation=False)
    for _ in range(50):
        first, second, again = filler.fill("{name1} {name2} {name1}").split(" ")
        assert first == again != second
        assert 3 <= int(filler.fill("{n:3-5}")) <= 5
    assert filler.fill("a {word} and a {other}", word=("egg",), other=("nut",)) == "an egg and a nut"
    assert (
        filler.fill("{text}", text=lambda: "{name} a egg \\n") == "{name} a egg \\n"
    )  # what is filled in stays as it is
    assert filler.fill("one\\ntwo") == "one\ntwo"


def asked(**changes: object) -> Asked:
    base = Asked(
        key="0-1",
        category="writing",
        messages=({"role": "user", "content": "Write."},),
        validation=False,
        temperature=0.0,
        max_tokens=8,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


TEXT = "The bridge was closed for three weeks, said the mayor, because of a crack in its second arch. Nobody was hurt."


def test_a_second_turn_has_the_first_and_its_answer_before_it() -> None:
    (following,) = FollowUps().after(asked(later_turns=("More.", "Less.")), " So. ")
    assert following.messages == (
        {"role": "user", "content": "Write."},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "More."},
    )
    assert following.later_turns == ("Less.",)
    assert following.key == "0-1+"


def test_an_article_is_summarised() -> None:
    found = FollowUps().after(asked(use="article"), TEXT)
    assert [one.category for one in found] in (["summary"], ["summary", "context"])
    assert all(TEXT in one.messages[-1]["content"] for one in found)
    assert not FollowUps().after(asked(use="article"), "Too short.")


def test_passages_are_asked_about_together_each_side_by_itself() -> None:
    follow_ups, found = FollowUps(), []
    for number in range(12):
        passage = f"{TEXT} ({number})"
        found += follow_ups.after(asked(use="passage", key=f"0-{number}", validation=number % 2 == 0), passage)
    assert len(found) >= 2
    for one in found:
        numbers = [number for number in range(12) if f"({number})" in one.messages[-1]["content"]]
        assert 3 <= len(numbers) <= 5
        assert {number % 2 == 0 for number in numbers} == {one.validation}


def test_listed_questions_are_asked_and_other_lines_are_not() -> None:
    answer = "Here they are:\n1. Who built the bridge?\n2. Why?\n- When was it opened to the public?\nThat is all."
    found = FollowUps().after(asked(use="questions"), answer)
    assert [one.messages[-1]["content"] for one in found] == [
        "Who built the bridge?",
        "When was it opened to the public?",
    ]
    assert [one.key for one in found] == ["0-1/0", "0-1/1"]


def test_only_german_is_translated_from_german() -> None:
    german = "Die Brücke ist seit drei Wochen gesperrt und niemand weiß warum. It was closed for three weeks, they say."
    found = FollowUps().after(asked(use="german"), german)
    assert len(found) == 1
    assert "Die Brücke ist seit drei Wochen gesperrt und niemand weiß warum." in found[0].messages[-1]["content"]


def test_an_asked_prompt_survives_json() -> None:
    one = asked(later_turns=("More.",), use="article", validation=True, temperature=0.7)
    assert Asked.from_json(json.loads(json.dumps(one.to_json()))) == one
    with pytest.raises(ValueError, match="unknown use"):
        Asked.from_json({**one.to_json(), "use": "novel"})


def test_own_prompts_come_in_four_rounds_the_first_greedy(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"Prompt {n}", "max_tokens": 9}) for n in range(40)))
    found = list(own_prompts(file, seed=1))
    assert len(found) == 160
    assert len({one.key for one in found}) == 160
    assert {one.temperature for one in found[:40]} == {0.0}
    assert len({one.temperature for one in found}) > 1
    assert {one.max_tokens for one in found} == {9}
    sides: dict[str, set[bool]] = {}
    for one in found:
        sides.setdefault(one.messages[-1]["content"], set()).add(one.validation)
    assert all(len(side) == 1 for side in sides.values())
    assert sum(side == {True} for side in sides.values()) == 2
