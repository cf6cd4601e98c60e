"""Arms, the paired plan, and the lines that keep one arm from finding another's prefill."""

from __future__ import annotations

import itertools
import json

import pytest

from tandem.bench.arms import BASELINE, ON, chosen_arms, parse_arm
from tandem.bench.plan import Sampling, plan_groups, tickets, with_ticket
from tandem.bench.workload import Workload, parse_workload
from tandem.cli.bench_run import parse_levels
from tandem.errors import InvalidRequest


def workload(**sizes: int) -> Workload:
    entries = [{"prompt": f"{name} {i}", "category": name} for name, count in sizes.items() for i in range(count)]
    return Workload(name="w", prompts=parse_workload("w", map(json.dumps, entries)))


def test_every_prompt_is_asked_once_in_each_arm_level_and_repeat() -> None:
    asked = workload(a=5, b=3)
    groups = plan_groups(asked, (BASELINE, ON), levels=(1, 4), repeats=2)
    for level, repeat in itertools.product((1, 4), (0, 1)):
        names = [p.name for g in groups if (g.concurrency, g.repeat) == (level, repeat) for p in g.prompts]
        assert sorted(names) == sorted(prompt.name for prompt in asked.prompts)
    assert all({arm.name for arm in group.arms} == {"off", "on"} for group in groups)
    assert all(len({prompt.category for prompt in group.prompts}) == 1 for group in groups)
    assert [group.index for group in groups] == list(range(len(groups)))
    sizes = [len(g.prompts) for g in groups if (g.concurrency, g.category, g.repeat) == (4, "a", 0)]
    assert sizes == [4, 1]


def test_which_arm_is_first_alternates_within_every_category_and_level() -> None:
    groups = plan_groups(workload(a=4, b=4), (BASELINE, ON), levels=(1, 2), repeats=1)
    for level, category in itertools.product((1, 2), "ab"):
        first = [g.arms[0].name for g in groups if (g.concurrency, g.category) == (level, category)]
        assert all(one != other for one, other in itertools.pairwise(first))


def test_of_three_arms_each_has_every_place() -> None:
    arms = chosen_arms(['x={"num_draft_tokens": 1}', "y={}"])
    groups = plan_groups(workload(a=3), arms, levels=(1,), repeats=1)
    assert [[arm.name for arm in group.arms] for group in groups] == [
        ["off", "x", "y"],
        ["x", "y", "off"],
        ["y", "off", "x"],
    ]


def test_a_run_that_is_cut_short_has_some_of_everything() -> None:
    groups = plan_groups(workload(a=8, b=8), (BASELINE, ON), levels=(1, 8), repeats=1)
    half = groups[: len(groups) // 2 + 1]
    assert {(group.concurrency, group.category) for group in half} == {(1, "a"), (1, "b"), (8, "a"), (8, "b")}
    assert sum(group.concurrency == 1 for group in half) in (7, 8)


def test_tickets_never_repeat_and_are_of_one_shape() -> None:
    lines = list(itertools.islice(tickets(123_456_789), 20_000))
    assert len(set(lines)) == len(lines)
    assert lines[0] == "Ticket 123 456 789"
    assert all(line.startswith("Ticket ") and [len(part) for part in line.split()[1:]] == [3, 3, 3] for line in lines)
    assert set(lines).isdisjoint(itertools.islice(tickets(123_456_790), 20_000))


def test_a_ticket_comes_first_whoever_speaks_first() -> None:
    system, user = {"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}
    assert with_ticket([system, user], "Ticket 1")[0] == {"role": "system", "content": "Ticket 1\n\nBe short."}
    assert with_ticket([user], "Ticket 1") == [{"role": "user", "content": "Ticket 1\n\nHi"}]
    assert with_ticket([system, user], None) == [system, user]


def test_a_request_streams_carries_its_arm_and_a_seed_only_where_there_is_one() -> None:
    message = [{"role": "user", "content": "Hi"}]
    body = Sampling(max_tokens=9, temperature=0.0, seed=None).body(message, BASELINE, max_tokens=None)
    assert (body["stream"], body["max_tokens"], body["speculation"]) == (True, 9, {"enabled": False})
    assert "seed" not in body
    seeded = Sampling(max_tokens=9, temperature=1.0, seed=5)
    assert seeded.body(message, ON, max_tokens=4)["seed"] == 5
    assert seeded.body(message, ON, max_tokens=4)["max_tokens"] == 4
    assert seeded.body(message, ON, max_tokens=40)["max_tokens"] == 9


def test_arms_are_the_baseline_and_what_is_named() -> None:
    assert chosen_arms([]) == (BASELINE, ON)
    arms = chosen_arms(['k4={"num_draft_tokens": 4}', 'plain={"enabled": false}'])
    assert [(arm.name, arm.speculates) for arm in arms] == [("off", False), ("k4", True), ("plain", False)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["k4"], "write NAME=JSON"),
        (["a b={}"], "write NAME=JSON"),
        (["={}"], "write NAME=JSON"),
        (["k4={"], "--arm k4: not JSON"),
        (["k4=4"], "--arm k4: must be a JSON object"),
        (["off={}"], "the name of the baseline"),
        (["a={}", "a={}"], "the name of another arm"),
        ([f"a{index}={{}}" for index in range(24)], "at most 23 arms"),
    ],
)
def test_wrong_arms_are_told_with_their_names(words: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        chosen_arms(words)


def test_an_arm_goes_into_the_request_as_it_is() -> None:
    assert parse_arm('x={"drafter": "ngram", "num_draft_tokens": 3}').speculation == {
        "drafter": "ngram",
        "num_draft_tokens": 3,
    }


@pytest.mark.parametrize("words", ["", "0", "1,,2", "1,1", "257", "-1", "a", ",".join(map(str, range(1, 18)))])
def test_levels_are_checked(words: str) -> None:
    with pytest.raises(InvalidRequest, match="--concurrency"):
        parse_levels(words)


def test_levels_are_numbers_in_order() -> None:
    assert parse_levels("8,1, 4") == (1, 4, 8)
