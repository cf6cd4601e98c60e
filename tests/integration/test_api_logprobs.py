"""Log-probabilities through the real services, against the model itself, with speculation and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gateway.seeds import seed_of_choice
from tests.stack import Stack

PROMPT = "The quick brown fox jumps over the lazy dog. "
OFF, ON = {"enabled": False}, {"num_draft_tokens": 5}

Law = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def law(target_folder: Path) -> Law:
    """The raw model's log-probabilities after every token of a text [length, vocab], by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)

    def of(token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([token_ids])).logits[0], dim=-1)

    return of


def choice_of(stack: Stack, **body: Any) -> dict[str, Any]:
    choice: dict[str, Any] = stack.complete(**{"return_token_ids": True, "ignore_eos": True, **body})["choices"][0]
    return choice


def chunks_of(stack: Stack, **body: Any) -> dict[str, list[Any]]:
    """The logprobs of a stream, put together."""
    whole: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    response = stack.client.post(f"{stack.url}/v1/completions", json={**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                whole[name] += values
    return whole


@pytest.mark.parametrize(("drafter", "temperature"), [("model", 0.0), ("model", 1.0), ("ngram", 0.0)])
def test_g1_log_probabilities_are_the_raw_models_with_and_without_speculation(
    stack: Stack, law: Law, temperature: float, drafter: str
) -> None:
    """Row i is the law that token i was drawn from; not 0.0, not the row before, not the row behind."""
    body = {"prompt": PROMPT, "temperature": temperature, "seed": 11, "max_tokens": 60, "logprobs": 3}
    plain = choice_of(stack, **body, speculation=OFF)
    answer = stack.complete(**body, ignore_eos=True, return_token_ids=True, speculation={**ON, "drafter": drafter})
    assert answer["speculation"]["drafted"] > answer["speculation"]["accepted"] > 0  # else nothing is shown here
    speculated = answer["choices"][0]
    assert speculated["token_ids"] == plain["token_ids"]
    values = speculated["logprobs"]["token_logprobs"]
    assert values == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-4)
    prompt = plain["prompt_token_ids"]
    rows = law(prompt + plain["token_ids"])[len(prompt) - 1 : -1]
    expected = [float(row[token_id]) for row, token_id in zip(rows, plain["token_ids"], strict=True)]
    assert values == pytest.approx(expected, abs=1e-4)
    assert min(values) < -0.1
    for row, top in zip(rows, speculated["logprobs"]["top_logprobs"], strict=True):
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("top", [0, 20])
def test_g1_g6_a_chats_log_probabilities_are_equal_too(stack: Stack, top: int) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "seed": 3, "ignore_eos": True}
    contents = []
    for speculation in (OFF, ON):
        response = stack.client.post(
            f"{stack.url}/v1/chat/completions",
            json={**body, "logprobs": True, "top_logprobs": top, "speculation": speculation},
        )
        contents.append(response.json()["choices"][0]["logprobs"]["content"])
    plain, speculated = contents
    assert len(speculated) == 30
    assert [entry["bytes"] for entry in speculated] == [entry["bytes"] for entry in plain]
    for one, other in zip(plain, speculated, strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert len(one["top_logprobs"]) == len(other["top_logprobs"]) == top
        assert all(alternative["token"] and alternative["bytes"] for alternative in other["top_logprobs"])  # A9, A10


def test_g5_logprobs_do_not_follow_temperature(stack: Stack) -> None:
    """Nor any other parameter of the law: the greedy path's values are the raw model's, whatever made it the path."""
    body = {"prompt": PROMPT, "max_tokens": 20, "logprobs": 2}
    greedy = choice_of(stack, **body, temperature=0)
    for sampling in ({"temperature": 0.2}, {"temperature": 1.5}, {"temperature": 1.0, "min_p": 0.5}, {"top_p": 0.3}):
        for speculation in (OFF, ON):
            # One candidate: the greedy path at any temperature.
            other = choice_of(stack, **body, **sampling, top_k=1, speculation=speculation)
            assert other["token_ids"] == greedy["token_ids"]
            assert other["logprobs"]["token_logprobs"] == pytest.approx(greedy["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize("num_draft_tokens", [2, 5, 16])
def test_d4_log_probabilities_end_at_the_stop(stack: Stack, num_draft_tokens: int) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 60, "logprobs": 1}
    whole = choice_of(stack, **body, speculation=OFF)
    stop = whole["text"][9:12]
    end = whole["text"].index(stop)
    for speculation in (OFF, {"num_draft_tokens": num_draft_tokens}):
        choice = choice_of(stack, **body, stop=stop, speculation=speculation)
        assert choice["text"] == whole["text"][:end]
        number = len(choice["token_ids"])
        assert choice["token_ids"] == whole["token_ids"][:number]
        assert all(len(values) == number for values in choice["logprobs"].values())
        assert choice["logprobs"]["tokens"] == whole["logprobs"]["tokens"][:number]


LENGTHS = [1, 2, 5, 31, 32, 33, 64, 65, 200, 700]


def test_g3_prompt_scores_are_the_raw_models_at_every_length(stack: Stack, law: Law) -> None:
    """At once, twice over, so that batches are mixed and prefixes are found in the cache."""
    prompts = [[(7 * length + 31 * i) % 256 for i in range(length)] for length in LENGTHS]

    def score(prompt: list[int]) -> list[dict[str, Any]]:
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 8, "temperature": 0}
        return [choice_of(stack, **body, speculation=speculation) for speculation in (ON, OFF)]

    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(score, prompts * 2))
    for prompt, (speculated, plain) in zip(prompts * 2, answers, strict=True):
        ids = prompt + speculated["token_ids"]
        rows = law(ids)
        expected = [float(rows[i, ids[i + 1]]) for i in range(len(ids) - 1)]
        for choice in (speculated, plain):
            first, *values = choice["logprobs"]["token_logprobs"]
            assert first is None
            assert choice["logprobs"]["top_logprobs"][0] is None
            assert values == pytest.approx(expected, abs=1e-4)


def test_a_prompt_is_scored_as_lm_evaluation_harness_asks(stack: Stack, law: Law) -> None:
    """Batches of ids, max_tokens 0 (or 1), echo, logprobs 1; the greedy token is the one with the largest value."""
    prompts = [[5, 6, 7, 8], [200, 100, 50], [9]]
    for max_tokens in (0, 1):
        answer = stack.complete(prompt=prompts, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0, seed=1234)
        assert answer["usage"]["prompt_tokens"] == 8
        assert answer["usage"]["completion_tokens"] == 3 * max_tokens
        for prompt, choice in zip(prompts, answer["choices"], strict=True):
            rows = law(prompt)
            values = choice["logprobs"]["token_logprobs"]
            assert len(values) == len(prompt) + max_tokens
            assert values[1 : len(prompt)] == pytest.approx(
                [float(rows[i, prompt[i + 1]]) for i in range(len(prompt) - 1)], abs=1e-4
            )
            for i, (value, top) in enumerate(zip(values[1:], choice["logprobs"]["top_logprobs"][1:], strict=True)):
                assert max(top.values()) == pytest.approx(float(rows[i].max()), abs=1e-4)
                assert value in top.values()


def test_text_and_its_echo_stream_as_they_come_whole(stack: Stack) -> None:
    body = {"prompt": "é漢字 abc", "echo": True, "logprobs": 2, "max_tokens": 30, "seed": 5, "return_token_ids": True}
    whole = stack.complete(**body)["choices"][0]
    assert whole["text"].startswith("é漢字 abc")
    assert chunks_of(stack, **body) == whole["logprobs"]
    offsets = whole["logprobs"]["text_offset"]
    assert len(offsets) == len(whole["token_ids"]) + len(whole["prompt_token_ids"])
    assert offsets == sorted(offsets)
    assert offsets[:8] == [0, 0, 1, 1, 1, 2, 2, 2]  # é is two tokens, 漢 and 字 are three


@pytest.mark.parametrize("speculation", [OFF, ON])
def test_n_answers_are_those_of_their_seeds(stack: Stack, speculation: dict[str, Any]) -> None:
    """And they find the prompt in the target's cache, as they start after the first."""
    body = {"prompt": PROMPT * 3, "max_tokens": 24, "return_token_ids": True, "speculation": speculation}
    answer = stack.complete(**body, n=4, seed=99)
    ids = [choice["token_ids"] for choice in answer["choices"]]
    assert len({tuple(part) for part in ids}) == 4
    for index in range(4):
        seed = seed_of_choice(99, index)
        signed = seed - 2**64 if seed >= 2**63 else seed
        assert stack.complete(**body, seed=signed)["choices"][0]["token_ids"] == ids[index]
    assert answer["usage"]["prompt_tokens"] == len(PROMPT) * 3
    assert answer["usage"]["completion_tokens"] == sum(map(len, ids))
