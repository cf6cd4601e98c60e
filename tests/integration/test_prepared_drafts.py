"""Drafts prepared while the target verifies, through the real services: they come, are counted, and change no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.stack import Stack

PROMPTS = ["Once upon a time, ", "The quick brown fox jumps over the lazy dog. The quick brown fox", "x"]
NUM_TOKENS = 96


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, target_folder: Path, draft_folder: Callable[[float], Path]
) -> Iterator[Stack]:
    """A draft equal to the target, so that nearly every outcome is the likeliest one."""
    with Stack(
        folder=tmp_path_factory.mktemp("prepared"),
        target_model=str(target_folder),
        draft_model=str(draft_folder(0.0)),
        settings={"TANDEM_DRAFT_LAW_SIZE": "300", "TANDEM_DRAFT_PREPARED_BRANCHES": "4"},
    ) as running:
        yield running


def ask(stack: Stack, prompt: str, *, speculation: dict[str, Any], **body: Any) -> tuple[list[int], dict[str, Any]]:
    answer = stack.complete(
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        return_token_ids=True,
        speculation=speculation,
        **body,
    )
    return answer["choices"][0]["token_ids"], answer["speculation"]


@pytest.mark.parametrize("drafter", ["model", "auto"])
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_the_text_is_plain_decodings_and_drafts_were_ready(stack: Stack, drafter: str, num_draft_tokens: int) -> None:
    before = stack.metric("gateway", "tandem_prepared_hits_total")
    hits = 0
    for prompt in PROMPTS:
        for body in ({"temperature": 0}, {"temperature": 1.0, "seed": 11}):
            plain, _ = ask(stack, prompt, speculation={"enabled": False}, **body)
            speculation = {"drafter": drafter, "num_draft_tokens": num_draft_tokens}
            spoken, report = ask(stack, prompt, speculation=speculation, **body)
            assert spoken == plain
            assert 0 <= report["prepared_hits"] <= report["rounds"] - report["draftless_rounds"]
            hits += report["prepared_hits"]
    assert stack.metric("gateway", "tandem_prepared_hits_total") - before == hits
    if num_draft_tokens == 1 and drafter == "model":
        assert hits > 0


def test_the_draft_service_counts_what_came_of_it_and_keeps_no_blocks(stack: Stack) -> None:
    ask(stack, PROMPTS[0], speculation={"drafter": "model", "num_draft_tokens": 2}, temperature=1.0)
    end = time.monotonic() + 10
    while stack.metric("draft", "tandem_kv_blocks_held") or stack.metric("draft", "tandem_sessions_open"):
        assert time.monotonic() < end, "blocks are held though no session is open"
        time.sleep(0.05)
    prepared = stack.metric("draft", "tandem_prepared_draft_tokens_total")
    wasted = stack.metric("draft", "tandem_prepared_draft_tokens_wasted_total")
    assert 0 < wasted < prepared
    assert stack.metric("draft", "tandem_prepared_drafts_total") > 20
    assert stack.metric("draft", "tandem_prepared_seconds_saved_total") > 0


def test_in_company_texts_stay_the_same(stack: Stack) -> None:
    def one(number: int) -> list[int]:
        speculation = {"drafter": "model" if number % 2 else "auto", "num_draft_tokens": 3}
        return ask(stack, f"{number} {PROMPTS[number % 3]}", speculation=speculation, temperature=1.0, seed=number)[0]

    alone = [one(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == alone


def test_a_draft_equal_to_the_target_is_accepted(stack: Stack) -> None:
    """F10 and more: at temperature 0 everything is accepted, at temperature 1 at least 98 %, the rest is rounding."""
    prompts = [*PROMPTS, "abcabcabcabcabcabc", "é漢字🙂 " * 5, " ".join(map(str, range(1, 160)))]
    for temperature, least in ((0.0, 1.0), (1.0, 0.98)):
        drafted = accepted = 0
        for seed, prompt in enumerate(prompts):
            report = stack.complete(
                prompt=prompt,
                temperature=temperature,
                max_tokens=128,
                ignore_eos=True,
                seed=seed,
                speculation={"verification": "rejection", "drafter": "model", "num_draft_tokens": 5},
            )["speculation"]
            drafted += report["drafted"]
            accepted += report["accepted"]
        assert drafted > 300
        assert accepted / drafted >= least
