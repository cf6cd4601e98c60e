"""The replay of answers through a drafter that looks up, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lookup_replay import Answer, Tally, match_table, read_answers, replay, runs_by_match, settings_table
from tandem.lookup.drafter import LookupDrafter

# The first answer token comes without a draft; then 3 is found behind 1, 2, and what follows the answer's 9 is not.
ANSWER = Answer(prompt_ids=(1, 2, 3, 4, 5, 6, 1), answer_ids=(2, 3, 4, 9, 8))


def tally_of(*, num_draft_tokens: int) -> Tally:
    tally = Tally()
    replay(ANSWER, LookupDrafter(least_certainty=0.0), num_draft_tokens=num_draft_tokens, tally=tally)
    return tally


def test_a_round_gives_what_was_right_and_one_token_more() -> None:
    # Draft 3 4 5: two are right, 9 comes instead of the third. Then one token is left, and nothing to draft.
    assert tally_of(num_draft_tokens=8) == Tally(tokens=4, calls=2, drafted=3, accepted=2)
    # Draft 3, and 4 comes with it. Draft 5, and 9 comes instead. Then one token is left.
    assert tally_of(num_draft_tokens=1) == Tally(tokens=4, calls=3, drafted=2, accepted=1)


def test_the_speedup_counts_drafted_tokens_at_their_cost() -> None:
    assert Tally(tokens=4, calls=2, drafted=4, accepted=2).speedup(0.25) == pytest.approx(4 / 3)


def test_runs_are_told_by_the_length_of_the_match() -> None:
    # After 1 2: 3 4. After 1 2 3: 4. After 1 2 3 4: 5 is wrong. After 9: nothing.
    assert runs_by_match([ANSWER]) == {0: [0], 2: [2], 3: [1], 4: [0]}


def test_tables_have_a_line_for_each_setting_and_each_match() -> None:
    assert len(list(settings_table([ANSWER], table=None, token_cost=0.045))) == 1 + 3 * 3 * 5
    assert len(list(match_table([ANSWER], token_cost=0.045))) == 1 + 4


def test_answers_of_one_token_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    rows = ({"prompt_ids": [1, 2], "answer_ids": ids, "category": "any"} for ids in ([3], [3, 4]))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert read_answers(file) == [Answer((1, 2), (3, 4))]
