"""The long proofs on the bundled model; `make prove` runs them (about half an hour on two cores)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.prompts import spec_bench
from tests.stack import Stack

pytestmark = [pytest.mark.prove, pytest.mark.bundled]

NUM_PROMPTS, NUM_TOKENS, STREAMS = 80, 128, 8


# The reference engine, the default engine when nothing is rounded, and as it comes: fast, weights and activations in
# 8 bits, and still equal to the bit however its tokens are split.
TARGETS = {
    "torch, float32": {"TANDEM_TARGET_ENGINE": "torch"},
    "openvino, float32": {},
    "openvino, as it comes": {"TANDEM_TARGET_DTYPE": "auto"},
}


@pytest.fixture(scope="module", params=TARGETS)
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The draft is the target's own first 20 layers, rounded: often right, often wrong."""
    with Stack(
        folder=tmp_path_factory.mktemp("prove"),
        target_model="bundled",
        draft_model="bundled",
        settings={
            "TANDEM_DRAFT_DTYPE": "bfloat16",
            "TANDEM_DRAFT_NUM_LAYERS": "20",
            "TANDEM_GATEWAY_DRAFT_TIMEOUT_SECONDS": "30",
            "TANDEM_GATEWAY_NUM_DRAFT_TOKENS": "auto",
            **TARGETS[request.param],
        },
    ) as running:
        yield running


def _answers(stack: Stack, num_prompts: int = NUM_PROMPTS, **speculation: Any) -> tuple[list[list[int]], int, int]:
    """Greedy ids for every prompt, and how many tokens were drafted and accepted."""

    def ask(prompt: str) -> dict[str, Any]:
        response = stack.client.post(
            f"{stack.url}/v1/chat/completions",
            json={
                "model": "tandem",
                "messages": [{"role": "user", "content": prompt}],
                "temperature": 0,
                "max_tokens": NUM_TOKENS,
                "return_token_ids": True,
                "speculation": speculation,
            },
        )
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    with ThreadPoolExecutor(STREAMS) as pool:
        answers = list(pool.map(ask, spec_bench(num_prompts)))
    ids = [answer["choices"][0]["token_ids"] for answer in answers]
    reports = [answer["speculation"] for answer in answers]
    return ids, sum(report["drafted"] for report in reports), sum(report["accepted"] for report in reports)


def test_greedy_text_of_80_prompts_is_plain_decoding_s_with_either_drafter(stack: Stack) -> None:
    plain, drafted, _ = _answers(stack, enabled=False)
    assert drafted == 0
    for drafter in ("ngram", "layer_skip", "auto"):
        ids, drafted, accepted = _answers(stack, drafter=drafter)
        print(f"\n{drafter}: {sum(map(len, ids))} tokens, accepted {accepted} of {drafted}: {accepted / drafted:.3f}")
        different = [i for i, (ours, theirs) in enumerate(zip(ids, plain, strict=True)) if ours != theirs]
        assert different == [], f"{drafter} changed the text of prompts {different}"
        assert 0 < accepted < drafted


@pytest.mark.parametrize("branches", ["0", "6"])
def test_greedy_text_is_plain_decoding_s_with_the_bundled_draft_at_every_k(tmp_path: Path, branches: str) -> None:
    """Both engines as they come; with drafts prepared, and without."""
    settings = {
        "TANDEM_TARGET_DTYPE": "auto",
        "TANDEM_DRAFT_DTYPE": "auto",
        "TANDEM_DRAFT_PREPARED_BRANCHES": branches,
        "TANDEM_GATEWAY_DRAFT_TIMEOUT_SECONDS": "30",
    }
    with Stack(folder=tmp_path, target_model="bundled", draft_model="bundled-draft", settings=settings) as stack:
        plain, _, _ = _answers(stack, 24, enabled=False)
        for k in (1, 2, 3, 5, 8, 16, "auto"):
            ids, drafted, accepted = _answers(stack, 24, drafter="model", num_draft_tokens=k)
            print(f"\n{branches} branches, k {k}: {sum(map(len, ids))} tokens, accepted {accepted} of {drafted}")
            assert ids == plain
            assert 0 < accepted < drafted


def test_a_draft_equal_to_the_target_is_accepted_at_temperature_one(tmp_path: Path) -> None:
    """With the draft's law as wide as 8,192 tokens; with the default 50 the tail that it never proposes is lost."""
    rates = {}
    for law_size in (50, 8192):
        with Stack(
            folder=tmp_path,
            target_model="bundled",
            draft_model="bundled",
            settings={"TANDEM_DRAFT_LAW_SIZE": str(law_size), "TANDEM_GATEWAY_DRAFT_TIMEOUT_SECONDS": "30"},
        ) as stack:
            drafted = accepted = 0
            for seed, prompt in enumerate(spec_bench(8)):
                report = stack.complete(
                    prompt=prompt,
                    temperature=1,
                    max_tokens=64,
                    ignore_eos=True,
                    seed=seed,
                    speculation={"verification": "rejection", "drafter": "model", "num_draft_tokens": 5},
                )["speculation"]
                drafted += report["drafted"]
                accepted += report["accepted"]
        rates[law_size] = accepted / drafted
    print(f"\nacceptance of an equal draft at temperature 1, by size of its law: {rates}")
    assert rates[8192] >= 0.98
    # Accepted / drafted counts what is behind a rejection too: 0.55 of five drafted is 0.8 at each position.
    assert rates[50] >= 0.4
