"""Workload files: what is read, how it is cut, and what is said where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.bench.workload import Prompt, Workload, load_workload, own_workload, parse_workload
from tandem.errors import InvalidRequest

SPEC_BENCH = Path(__file__).parents[2] / "benchmarks" / "data" / "spec_bench.jsonl"


def parsed(*entries: dict[str, Any]) -> tuple[Prompt, ...]:
    return parse_workload("x.jsonl", [json.dumps(entry) for entry in entries])


def test_spec_bench_has_six_categories_of_eighty() -> None:
    workload = load_workload(SPEC_BENCH)
    sizes = {name: sum(prompt.category == name for prompt in workload.prompts) for name in workload.categories}
    assert sizes == dict.fromkeys(("conversation", "translation", "summarization", "qa", "math_reasoning", "rag"), 80)
    assert workload.name == "spec_bench"
    assert workload.prompts[0].name == "spec_bench.jsonl:1"
    assert len(workload.prompts[0].turns) == 2
    assert {len(prompt.turns) for prompt in workload.first_turns(1).prompts} == {1}


def test_the_first_of_a_category_are_of_all_its_sources() -> None:
    chosen = load_workload(SPEC_BENCH).per_category(8)
    assert len(chosen.prompts) == 48
    sources = [prompt.source for prompt in chosen.prompts if prompt.category == "conversation"]
    assert len(set(sources)) == 8
    names = [prompt.name for prompt in chosen.prompts if prompt.category == "translation"]
    assert names == [f"spec_bench.jsonl:{line}" for line in range(81, 89)]


def test_a_sample_is_a_function_of_its_seed() -> None:
    workload = load_workload(SPEC_BENCH)
    first, again, other = (workload.per_category(5, sample_seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(first.prompts) == 30
    assert len({prompt.name for prompt in first.prompts}) == 30


def test_our_own_set_has_eight_prompts_in_each_of_six_categories() -> None:
    workload = own_workload()
    assert workload.categories == (
        "conversation", "translation", "summarization", "retrieval", "arithmetic", "code_editing",
    )  # fmt: skip
    assert [sum(p.category == name for p in workload.prompts) for name in workload.categories] == [8] * 6
    assert len({prompt.turns for prompt in workload.prompts}) == 48


def test_prompts_and_messages_are_read_with_what_they_may_have() -> None:
    system, user = {"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}
    plain, talk = parsed({"prompt": "Hi", "extra": 1}, {"messages": [system, user], "category": "c", "max_tokens": 7})
    assert (plain.turns, plain.opening, plain.category, plain.max_tokens) == (("Hi",), (), "prompts", None)
    assert (talk.turns, talk.opening, talk.category, talk.max_tokens) == (("Hi",), (system,), "c", 7)
    assert talk.name == "x.jsonl:2"


def test_empty_lines_are_passed_over_and_lines_keep_their_numbers() -> None:
    assert [p.name for p in parse_workload("x", ["", '{"prompt": "a"}', "  ", '{"prompt": "b"}'])] == ["x:2", "x:4"]


def test_a_line_is_not_ended_by_what_python_calls_a_line_end(tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    file.write_text('{"prompt": "one\u2028line"}\n', encoding="utf-8")
    assert load_workload(file).prompts[0].turns == ("one\u2028line",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ('{"text": "x"}', "has none"),
        ('{"prompt": "x", "turns": ["x"]}', "has turns and prompt"),
        ('{"prompt": 5}', '"prompt" must be a text'),
        ('{"prompt": "  "}', '"prompt" must be a text that is not empty'),
        ('{"turns": []}', '"turns" must be a list of 1 to 64'),
        ('{"turns": ["a", null]}', r'"turns\[1\]" must be'),
        ('{"messages": []}', '"messages" must be a list'),
        ('{"messages": [{"role": "wizard", "content": "x"}]}', r'"messages\[0\].role" must be one of system'),
        ('{"messages": [{"role": "user", "content": [1]}]}', r'"messages\[0\].content" must be a text'),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "must end with the user's"),
        ('{"prompt": "x", "category": ""}', '"category" must be a name'),
        ('{"prompt": "x", "max_tokens": 0}', '"max_tokens" must be a whole number from 1'),
        ('{"prompt": "x", "max_tokens": true}', '"max_tokens" must be'),
    ],
)
def test_what_is_wrong_is_told_with_file_line_and_field(line: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"w\.jsonl.*{words}"):
        parse_workload("w.jsonl", ['{"prompt": "fine"}', line])


def test_files_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="more than 10,000 prompts"):
        parse_workload("w", ['{"prompt": "x"}'] * 10_001)
    with pytest.raises(InvalidRequest, match="25 categories"):
        parsed(*({"prompt": "x", "category": f"c{index}"} for index in range(25)))
    with pytest.raises(InvalidRequest, match="has no prompts"):
        parse_workload("w", [])
    big = tmp_path / "big.jsonl"
    with big.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(InvalidRequest, match="67,108,865 bytes"):
        load_workload(big)
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(InvalidRequest, match="cannot read"):
        load_workload(tmp_path / "latin")


def test_a_selection_larger_than_a_category_is_all_of_it() -> None:
    workload = Workload(name="w", prompts=parsed({"prompt": "a"}, {"prompt": "b"}))
    assert workload.per_category(5).prompts == workload.prompts
