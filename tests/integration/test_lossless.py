"""What speculation may never change: the text. Real services, tiny random float32 models."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.stack import Stack

PROMPTS = [
    "Once upon a time, ",
    "abcabcabcabcabcabc",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "é漢字🙂 " * 5,
    "x",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 " * 8,
]


def _ids(stack: Stack, prompt: str, **speculation: Any) -> list[int]:
    answer = stack.complete(
        prompt=prompt,
        temperature=0,
        max_tokens=64,
        ignore_eos=True,
        return_token_ids=True,
        speculation=speculation,
    )
    ids: list[int] = answer["choices"][0]["token_ids"]
    assert len(ids) == answer["usage"]["completion_tokens"] == 64
    return ids


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5, 8, 16])
def test_greedy_text_is_that_of_plain_decoding(stack: Stack, drafter: str, num_draft_tokens: int) -> None:
    for prompt in PROMPTS:
        plain = _ids(stack, prompt, enabled=False)
        assert _ids(stack, prompt, drafter=drafter, num_draft_tokens=num_draft_tokens) == plain


def test_speculation_really_happened(stack: Stack) -> None:
    """Non-vacuity of the test above: tokens were drafted, some accepted and some rejected."""
    for drafter in ("model", "ngram"):
        report = stack.complete(
            prompt=PROMPTS[2], temperature=0, max_tokens=400, ignore_eos=True, speculation={"drafter": drafter}
        )["speculation"]
        assert 0 < report["accepted"] < report["drafted"], report
        assert report["rounds"] == 400 - report["accepted"]


def test_sixteen_concurrent_streams_say_what_each_says_alone(stack: Stack) -> None:
    """Bug A8: sessions share batches, blocks and prefixes, never tokens."""
    prompts = [f"Story number {i * i}: " + "word " * (i % 5) for i in range(16)]
    alone = [_ids(stack, prompt) for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda prompt: _ids(stack, prompt), prompts))
    assert together == alone


@pytest.mark.parametrize("max_tokens", range(1, 11))
def test_c7_exactly_max_tokens_are_delivered_under_speculation(stack: Stack, max_tokens: int) -> None:
    answer = stack.complete(
        prompt=PROMPTS[1],
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        return_token_ids=True,
        speculation={"num_draft_tokens": 4},
    )
    assert len(answer["choices"][0]["token_ids"]) == max_tokens == answer["usage"]["completion_tokens"]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_e9_e12_the_context_is_filled_to_its_last_token(stack: Stack) -> None:
    """k is cut to what the context leaves; the answer ends with `length`, without an error."""
    prompt = list(range(97, 107)) * 204  # 2,040 of 2,048 tokens
    answer = stack.complete(
        prompt=prompt, temperature=0, max_tokens=8, ignore_eos=True, speculation={"num_draft_tokens": 16}
    )
    assert answer["usage"]["total_tokens"] == 2048
