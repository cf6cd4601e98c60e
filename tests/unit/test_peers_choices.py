"""The pure parts of the peers' benchmark: settings, turns, rows."""

from __future__ import annotations

import pytest

from benchmarks.peers.arms import ARMS, BASELINE, Arm, chosen
from benchmarks.peers.choices import best_setting, extremes, rate_of, rotated
from benchmarks.peers.peer import Prompt, Result
from benchmarks.peers.run import Outcome
from benchmarks.peers.tables import make_rows


def _result(
    *, num_tokens: int = 11, total_seconds: float = 2.0, first_num_tokens: int = 1, num_calls: int | None = None
) -> Result:
    return Result(
        num_tokens=num_tokens,
        first_token_seconds=1.0,
        first_num_tokens=first_num_tokens,
        total_seconds=total_seconds,
        text="",
        num_calls=num_calls,
    )


def _prompt(question_id: str, category: str) -> Prompt:
    return Prompt(question_id=question_id, category=category, text="", token_ids=(1,))


def _outcome(name: str, results: dict[str, Result], reason: str | None = None) -> Outcome:
    return Outcome(arm=Arm(name=name, family="x", settings={"s": {}}), setting="s", results=results, reason=reason)


def test_the_fastest_setting_is_best_and_of_equals_the_first() -> None:
    assert best_setting({"a": 1.0, "b": 3.0, "c": 3.0}, {"d": "hung"}).best == "b"


def test_there_is_no_best_setting_where_all_failed() -> None:
    tuned = best_setting({}, {"a": "hung"})
    assert tuned.best is None
    assert tuned.failures == {"a": "hung"}


def test_the_rate_of_several_answers_is_all_tokens_over_all_seconds() -> None:
    assert rate_of([_result(num_tokens=30, total_seconds=1.0), _result(num_tokens=10, total_seconds=3.0)]) == 10.0


def test_in_as_many_turns_as_there_are_arms_each_is_first_once_and_last_once() -> None:
    orders = [rotated("abcd", turn) for turn in range(4)]
    assert sorted(order[0] for order in orders) == list("abcd")
    assert sorted(order[-1] for order in orders) == list("abcd")
    assert all(sorted(order) == list("abcd") for order in orders)


def test_the_next_cycle_goes_round_the_other_way() -> None:
    assert rotated("abc", 0) == ["a", "b", "c"]
    assert rotated("abc", 3) == ["c", "b", "a"]
    assert rotated([], 5) == []


def test_the_decode_rate_leaves_out_all_that_came_first() -> None:
    assert _result(num_tokens=11, first_num_tokens=1).decode_tokens_per_second == 10.0
    assert _result(num_tokens=11, first_num_tokens=3).decode_tokens_per_second == 8.0
    assert _result(num_tokens=1).decode_tokens_per_second is None


def test_tokens_a_call_are_known_where_calls_are() -> None:
    assert _result(num_tokens=12, num_calls=4).tokens_per_call == 3.0
    assert _result().tokens_per_call is None


def test_rows_pair_by_prompt_and_the_fastest_comes_first() -> None:
    prompts = [_prompt("1", "qa"), _prompt("2", "rag")]
    plain = _outcome(BASELINE, {"1": _result(num_tokens=10), "2": _result(num_tokens=40)})
    fast = _outcome("fast", {"1": _result(num_tokens=20, num_calls=10), "2": _result(num_tokens=120, num_calls=60)})
    first, second = make_rows([plain, fast], prompts)
    assert (first.name, second.name) == ("fast", BASELINE)
    assert first.ratio is not None
    assert first.ratio.estimate == pytest.approx(2.5)  # of 2 and 3; of the medians it would be 70 / 25
    assert first.rate_by_category == {"qa": 10.0, "rag": 60.0}
    assert first.tokens_per_call == 2.0
    assert second.ratio is not None
    assert second.ratio.estimate == 1.0


def test_a_peer_that_broke_keeps_what_it_answered_and_one_that_never_ran_says_why() -> None:
    prompts = [_prompt("1", "qa"), _prompt("2", "rag")]
    rows = make_rows(
        [
            _outcome(BASELINE, {"1": _result(), "2": _result()}),
            _outcome("absent", {}, reason="not installed: no compiler"),
            _outcome("broke", {"1": _result()}, reason="failed at prompt 2: no answer after 120 s"),
        ],
        prompts,
    )
    broke, absent = next(row for row in rows if row.name == "broke"), rows[-1]
    assert (broke.num_prompts, broke.reason) == (1, "failed at prompt 2: no answer after 120 s")
    assert (absent.name, absent.rate, absent.ratio) == ("absent", None, None)
    assert absent.reason == "not installed: no compiler"


def test_every_arm_is_tuned_over_both_numbers_of_threads() -> None:
    assert len({arm.name for arm in ARMS}) == len(ARMS)
    for arm in ARMS:
        assert {setting["threads"] for setting in arm.settings.values()} == {1, 2}, arm.name


def test_the_baseline_is_always_among_the_chosen_arms() -> None:
    assert [arm.name for arm in chosen(["llama.cpp, plain"])] == [BASELINE, "llama.cpp, plain"]
    assert chosen([]) == ARMS
    for arm in chosen([], threads=2):
        assert arm.settings
        assert all(setting["threads"] == 2 for setting in arm.settings.values())
    with pytest.raises(ValueError, match="no arm begins with 'nope'"):
        chosen(["nope"])


def test_a_peer_is_warmed_up_with_the_shortest_and_the_longest_prompt() -> None:
    prompts = [
        Prompt(question_id=str(length), category="qa", text="", token_ids=(1,) * length) for length in (3, 1, 9, 4)
    ]
    assert [prompt.question_id for prompt in extremes(prompts)] == ["1", "9"]
