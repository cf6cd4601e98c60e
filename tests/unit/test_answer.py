"""Where answers end, and what they show, whatever way the tokens are cut into rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answer import Answer, AnswerRules, AnswerToken, Delta, SpeculationTally
from gateway.detokenize import TokenTable
from gateway.speculate import Round
from tandem.types import DraftlessReason, FinishReason, ServiceTimes, TokenLogprob, TokenOrigin, Verification
from tests.fakes import END, START, library_tokenizer

TABLE = TokenTable(library_tokenizer())


def round_of(token_ids: Sequence[int], *, num_drafted: int | None = None) -> Round:
    """A round whose draft was accepted whole (but for rejected ones that `num_drafted` adds)."""
    accepted = len(token_ids) - 1
    drafted = accepted if num_drafted is None else num_drafted
    last = TokenOrigin.PLAIN if not drafted else TokenOrigin.BONUS if drafted == accepted else TokenOrigin.RECOVERED
    return Round(
        token_ids=tuple(token_ids),
        origins=(*[TokenOrigin.ACCEPTED] * accepted, last),
        num_drafted=drafted,
        num_accepted=accepted,
        draftless_reason=None if drafted else DraftlessReason.OFF,
    )


def run(
    rules: AnswerRules, rounds: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
) -> tuple[str, list[AnswerToken], FinishReason | None, list[Delta]]:
    """Text, tokens and end of the answer, and its deltas."""
    answer = Answer(rules, TABLE.detokenizer(skip_special_tokens=skip_special_tokens))
    deltas: list[Delta] = []
    for token_ids in rounds:
        delta = answer.consume(round_of(token_ids))
        if delta is not None:
            deltas.append(delta)
        if answer.finish_reason is not None:
            break
    tokens = [token for delta in deltas for token in delta.tokens]
    if answer.finish_reason is not None:
        assert answer.num_tokens == len(tokens)
        assert deltas[-1].finish_reason is answer.finish_reason
    return "".join(delta.text for delta in deltas), tokens, answer.finish_reason, deltas


def ids(tokens: Sequence[AnswerToken]) -> list[int]:
    return [token.token_id for token in tokens]


@pytest.mark.parametrize("limit", range(1, 11))
def test_c7_exactly_max_tokens_are_delivered_and_counted(limit: int) -> None:
    text, tokens, reason, _ = run(AnswerRules(max_tokens=limit), [b"a", b"bcdef", b"ghijk"])
    assert text == "abcdefghijk"[:limit]
    assert len(tokens) == limit
    assert reason is FinishReason.LENGTH


def test_d6_nothing_follows_an_end_token_in_the_middle_of_a_round() -> None:
    rules = AnswerRules(max_tokens=100, end_token_ids=frozenset([END]))
    text, tokens, reason, _ = run(rules, [b"a", (*b"bc", END, *b"de")])
    assert text == "abc"
    assert ids(tokens) == [*b"abc", END]
    assert reason is FinishReason.STOP


def test_d5_a_stop_string_that_ends_in_the_middle_of_a_round_ends_the_answer_there() -> None:
    """D4, D5, D8: the token that completes the stop string is the last in ids, text and count."""
    text, tokens, reason, _ = run(AnswerRules(max_tokens=100, stops=("cd",)), [b"a", b"bcdefghijklmnopq"])
    assert text == "ab"
    assert ids(tokens) == [*b"abcd"]
    assert [token.text for token in tokens] == ["a", "b", "", ""]
    assert reason is FinishReason.STOP


def test_d1_no_part_of_a_stop_string_leaves_before_its_match_fails() -> None:
    _, _, _, deltas = run(AnswerRules(max_tokens=100, stops=("bcX",)), [b"a", b"b", b"c", b"d"])
    assert [delta.text for delta in deltas] == ["a", "bcd"]
    assert [ids(delta.tokens) for delta in deltas] == [[*b"a"], [*b"bcd"]]


def test_d11_no_delta_but_the_last_is_without_text() -> None:
    _, _, _, deltas = run(
        AnswerRules(max_tokens=9, stops=("xyz",)), ["é".encode()[:1], "é".encode()[1:], (START,), b"x", b"y", b"a"]
    )
    assert [delta.text for delta in deltas] == ["é", "xya"]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_d12_text_ends_before_or_after_a_special_stop_token(skip: bool, include: bool) -> None:
    rules = AnswerRules(max_tokens=100, end_token_ids=frozenset([START]), include_stop=include)
    shown = "<|im_start|>" if include and not skip else ""
    for rounds in ([b"ab", (START, *b"cd")], [b"a", b"b", (START,)], [(*b"ab", START, *b"c")]):
        text, tokens, reason, _ = run(rules, rounds, skip_special_tokens=skip)
        assert text == "ab" + shown
        assert ids(tokens) == [*b"ab", START]
        assert reason is FinishReason.STOP


@pytest.mark.parametrize(("include", "expected"), [(False, "ab"), (True, "abc")])
def test_d12_an_ordinary_stop_token_is_text_only_where_asked_for(include: bool, expected: str) -> None:
    rules = AnswerRules(max_tokens=100, end_token_ids=frozenset(b"c"), include_stop=include)
    text, tokens, _, _ = run(rules, [b"abcd"])
    assert text == expected
    assert ids(tokens) == [*b"abc"]


def test_before_min_tokens_neither_end_tokens_nor_stop_strings_end_the_answer() -> None:
    rules = AnswerRules(max_tokens=100, min_tokens=3, end_token_ids=frozenset([END]), stops=("b",))
    text, tokens, reason, _ = run(rules, [b"ab", (END,), b"ab"])
    assert text == "aba"
    assert ids(tokens) == [*b"ab", END, *b"ab"]
    assert reason is FinishReason.STOP


def test_an_end_token_at_max_tokens_is_a_stop() -> None:
    _, _, reason, _ = run(AnswerRules(max_tokens=2, end_token_ids=frozenset([END])), [b"a", (END,)])
    assert reason is FinishReason.STOP


def test_a2_an_incomplete_character_at_the_end_is_flushed() -> None:
    text, tokens, _, _ = run(AnswerRules(max_tokens=2), [(0x61, 0xC3)])
    assert text == "a\ufffd"
    assert [token.text for token in tokens] == ["a", "\ufffd"]


def test_tokens_say_where_they_come_from() -> None:
    _, tokens, _, _ = run(AnswerRules(max_tokens=4), [b"a", b"bcd"])
    assert [(t.origin.value, t.round, t.position) for t in tokens] == [
        ("plain", 0, 0),
        ("accepted", 1, 1),
        ("accepted", 1, 2),
        ("bonus", 1, 3),
    ]


@given(
    st.lists(st.one_of(st.sampled_from([*b"abc", 0xC3, 0xA9, 0xF0, END, START]), st.integers(0, END)), min_size=1),
    st.lists(st.integers(1, 6)),
    st.lists(st.text(alphabet="abcé", min_size=1, max_size=3), max_size=2),
    st.integers(0, 5),
    st.booleans(),
)
def test_a7_d2_any_split_into_rounds_gives_the_same_answer(
    token_ids: list[int], sizes: list[int], stops: list[str], min_tokens: int, include: bool
) -> None:
    rules = AnswerRules(
        max_tokens=len(token_ids),
        min_tokens=min_tokens,
        end_token_ids=frozenset([END]),
        stops=tuple(stops),
        include_stop=include,
    )
    rounds: list[list[int]] = []
    left = list(token_ids)
    for size in [*sizes, *[1] * len(token_ids)]:
        if left:
            rounds.append(left[:size])
            left = left[size:]
    text, tokens, reason, _ = run(rules, rounds)
    whole_text, whole_tokens, whole_reason, _ = run(rules, [token_ids])
    assert (text, ids(tokens), reason) == (whole_text, ids(whole_tokens), whole_reason)
    assert "".join(token.text for token in tokens) == text


def test_d4_log_probabilities_end_where_the_tokens_end() -> None:
    answer = Answer(AnswerRules(max_tokens=9, stops=("cd",)), TABLE.detokenizer(skip_special_tokens=True))
    scores = tuple(TokenLogprob(-float(token_id), ()) for token_id in b"abcdef")
    delta = answer.consume(replace(round_of(b"abcdef"), logprobs=scores))
    assert delta is not None
    assert [token.logprob for token in delta.tokens] == list(scores[:4])


def test_of_an_answer_of_no_tokens_the_first_round_is_the_end() -> None:
    text, tokens, reason, _ = run(AnswerRules(max_tokens=0), [b"a"])
    assert (text, tokens, reason) == ("", [], FinishReason.LENGTH)


def test_what_the_round_held_after_the_end_is_counted_as_dropped() -> None:
    answer = Answer(AnswerRules(max_tokens=2), TABLE.detokenizer(skip_special_tokens=True))
    answer.consume(round_of(b"abcde"))  # a b are the answer; c d were accepted too, e is the bonus
    assert answer.num_tokens == 2
    assert answer.num_accepted_dropped == 2


def test_the_tally_counts_what_the_target_tested() -> None:
    tally = SpeculationTally(num_draft_tokens=3)
    tally.add(round_of(b"a"))
    tally.add(replace(round_of(b"bcde"), prepared=True))  # 3 of 3
    tally.add(round_of(b"fg", num_drafted=3))  # 1 of 3
    report = tally.report(seed=7, verification=Verification.COUPLED)
    assert report["rounds"] == 3
    assert report["draftless_rounds"] == 1
    assert report["drafted"] == 6
    assert report["accepted"] == 4
    assert report["prepared_hits"] == 1
    assert report["acceptance_rate"] == 4 / 6
    assert report["acceptance_length"] == 7 / 3  # 7 tokens, 3 target calls
    assert report["accepted_per_position"] == [2, 1, 1]
    assert (report["seed"], report["verification"]) == (7, "coupled")


def test_k9_ratios_of_nothing_are_null() -> None:
    report = SpeculationTally(num_draft_tokens=0).report(seed=0, verification=Verification.REJECTION)
    assert report["acceptance_rate"] is None
    assert report["acceptance_length"] is None
    assert report["accepted_per_position"] == []


def test_seconds_are_split_by_where_they_were_spent() -> None:
    tally = SpeculationTally(num_draft_tokens=1)
    tally.add(
        Round(
            token_ids=(1,),
            origins=(TokenOrigin.RECOVERED,),
            num_drafted=1,
            num_accepted=0,
            draftless_reason=None,
            draft_seconds=0.5,
            draft_service_seconds=0.25,
            verify_seconds=1.0,
            verify_times=ServiceTimes(queue_seconds=0.125, forward_seconds=0.5),
            num_bytes=100,
        )
    )
    report = tally.report(seed=0, verification=Verification.REJECTION)
    assert (report["draft_seconds"], report["verify_seconds"], report["network_seconds"]) == (0.25, 0.625, 0.625)
    assert report["bytes_sent"] == 100
