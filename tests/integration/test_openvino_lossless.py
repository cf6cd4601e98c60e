"""The services as they come on a CPU: OpenVINO, 8-bit weights, rounded activations, k by what pays. Nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tandem.models.gguf_export import export_gguf
from tests.stack import Stack
from tests.tiny_models import write_target

PROMPTS = ["the cat sat on the mat. " * 5, "x = [1, 2, 3]\nx = [1, 2, 3]\n", "hello", "é漢字, é漢字 and é"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("openvino")
    hugging_face = write_target(folder / "tiny", layers=3, merges=[("t", "h"), ("th", "e")])
    export_gguf(hugging_face, folder / "tiny.gguf", quantization="Q4_1")
    with Stack(
        folder=folder,
        target_model=str(folder / "tiny.gguf"),
        draft_model=str(folder / "tiny.gguf"),
        settings={
            "TANDEM_CACHE": str(folder / "cache"),
            "TANDEM_TARGET_DTYPE": "auto",
            "TANDEM_DRAFT_DTYPE": "auto",
            "TANDEM_DRAFT_NUM_LAYERS": "2",
            "TANDEM_GATEWAY_NUM_DRAFT_TOKENS": "auto",
        },
    ) as running:
        yield running


def _ids(stack: Stack, prompt: str, speculation: dict[str, Any], **more: Any) -> list[int]:
    answer = stack.complete(
        prompt=prompt, max_tokens=96, ignore_eos=True, return_token_ids=True, speculation=speculation, **more
    )
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def test_it_is_openvino_that_serves(stack: Stack) -> None:
    page = stack.client.get(f"http://127.0.0.1:{stack.target_metrics_port}/metrics").text
    assert 'engine="openvino"' in page


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 11}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", ["ngram", "layer_skip", "auto"])
@pytest.mark.parametrize("num_draft_tokens", ["auto", 1, 3, 8, 16])
def test_the_text_is_that_of_plain_decoding(
    stack: Stack, drafter: str, num_draft_tokens: int | str, sampling: dict[str, Any]
) -> None:
    wish = {"drafter": drafter, "num_draft_tokens": num_draft_tokens}
    for prompt in PROMPTS:
        assert _ids(stack, prompt, wish, **sampling) == _ids(stack, prompt, {"enabled": False}, **sampling)


def test_company_changes_nothing(stack: Stack) -> None:
    """Eight at once, each with another drafter or k, against each alone without a draft."""
    wishes = [
        {"enabled": False},
        {"drafter": "ngram", "num_draft_tokens": 16},
        {"drafter": "layer_skip", "num_draft_tokens": 3},
        {"drafter": "auto"},
    ]
    asked = [(prompt, seed, wishes[(i + seed) % 4]) for i, prompt in enumerate(PROMPTS) for seed in range(4)]
    alone = [_ids(stack, prompt, {"enabled": False}, seed=seed) for prompt, seed, _ in asked]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda one: _ids(stack, one[0], one[2], seed=one[1]), asked))
    assert together == alone


def test_speculation_really_happened(stack: Stack) -> None:
    for drafter in ("ngram", "layer_skip", "auto"):
        report = stack.complete(
            prompt=PROMPTS[0],
            max_tokens=96,
            ignore_eos=True,
            temperature=0,
            speculation={"drafter": drafter, "num_draft_tokens": 4},
        )["speculation"]
        assert report["drafted"] > 0
        assert report["accepted"] > 0
