"""Public bug reports on sampling, stops and limits, each tried on the real services. Ids: the reports' letters.

With a seed, plain decoding and speculation are coupled: most of these tests ask for the same tokens from both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stack import Stack
from tests.tiny_models import SPECIAL_TOKENS

PROMPT = "The quick brown fox jumps over the lazy dog. "
OFF = {"enabled": False}
END, USER = (256 + SPECIAL_TOKENS.index(token) for token in ("<|end|>", "<|user|>"))


def answer_of(stack: Stack, **body: Any) -> dict[str, Any]:
    return stack.complete(**{"prompt": PROMPT, "ignore_eos": True, "return_token_ids": True, **body})


def ids_of(stack: Stack, **body: Any) -> list[int]:
    ids: list[int] = answer_of(stack, **body)["choices"][0]["token_ids"]
    return ids


def on_and_off(stack: Stack, *, num_draft_tokens: int = 5, **body: Any) -> dict[str, Any]:
    """The choice with speculation, once it is found equal to that of plain decoding."""
    plain = answer_of(stack, **body, speculation=OFF)["choices"][0]
    choice: dict[str, Any] = answer_of(stack, **body, speculation={"num_draft_tokens": num_draft_tokens})["choices"][0]
    assert {**choice, "logprobs": None} == {**plain, "logprobs": None}  # test_api_logprobs.py compares those
    return choice


def refusal(stack: Stack, **body: Any) -> dict[str, Any]:
    """The error of a request that must get a 400."""
    response = stack.client.post(f"{stack.url}/v1/completions", json={"prompt": "a", **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


# --- F: sampling


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-300])
def test_f1_a_tiny_temperature_is_greedy_and_finite(stack: Stack, temperature: float) -> None:
    greedy = ids_of(stack, temperature=0, max_tokens=40)
    choice = on_and_off(stack, temperature=temperature, seed=1, max_tokens=40, logprobs=1)
    assert choice["token_ids"] == greedy
    assert all(-100 < value <= 0 for value in choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("top_p", [1e-4, 1e-5, 1e-8, 1e-38, 1e-300])
def test_f1_a_tiny_top_p_is_greedy_and_finite(stack: Stack, top_p: float) -> None:
    assert on_and_off(stack, top_p=top_p, seed=1, max_tokens=40)["token_ids"] == ids_of(
        stack, temperature=0, max_tokens=40
    )


@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_f3_speculation_samples_it_does_not_take_the_argmax(stack: Stack, verification: str) -> None:
    speculation = {"num_draft_tokens": 5, "verification": verification}
    texts = {
        tuple(ids_of(stack, temperature=1, seed=seed, max_tokens=12, speculation=speculation)) for seed in range(8)
    }
    assert len(texts) >= 6


@pytest.mark.parametrize("parameter", ["temperature", "top_p", "top_k", "min_p"])
def test_f5_speculation_heeds_the_requests_parameters(stack: Stack, parameter: str) -> None:
    """A narrow law shows fewer tokens than a wide one; and both are those of plain decoding."""
    narrow, wide = {"temperature": (0.2, 1.5), "top_p": (0.2, 1.0), "top_k": (2, 0), "min_p": (0.6, 0.0)}[parameter]
    seen: list[int] = []
    for value in (narrow, wide):
        body: dict[str, Any] = {"temperature": 1.5, "max_tokens": 16, parameter: value}
        seen.append(len({i for seed in range(10) for i in on_and_off(stack, seed=seed, **body)["token_ids"]}))
    assert seen[0] < 0.8 * seen[1], seen


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("num_draft_tokens", [1, 5, 16])
def test_f7_a_banned_token_appears_at_no_position(stack: Stack, temperature: float, num_draft_tokens: int) -> None:
    body: dict[str, Any] = {"temperature": temperature, "seed": 4, "max_tokens": 60}
    usual = ids_of(stack, **body)
    banned = {str(token_id): -100 for token_id in sorted(set(usual), key=usual.count)[-8:]}
    ids = on_and_off(stack, **body, logit_bias=banned, num_draft_tokens=num_draft_tokens)["token_ids"]
    assert not {int(token_id) for token_id in banned} & set(ids)
    assert len(set(ids)) > 1


def test_f7_min_p_holds_at_every_position(stack: Stack) -> None:
    """min_p 1 leaves the most likely token alone, at drafted positions too."""
    greedy = ids_of(stack, temperature=0, max_tokens=60)
    assert on_and_off(stack, temperature=1.5, min_p=1.0, seed=2, max_tokens=60)["token_ids"] == greedy


def test_f8_a_seed_gives_the_same_text_every_time_and_another_seed_another(stack: Stack) -> None:
    texts = [answer_of(stack, seed=7, max_tokens=40)["choices"][0]["text"] for _ in range(3)]
    texts += [
        answer_of(stack, seed=7, max_tokens=40, speculation=speculation)["choices"][0]["text"]
        for speculation in (OFF, {"num_draft_tokens": 1}, {"num_draft_tokens": 16}, {"drafter": "ngram"})
    ]
    assert len(set(texts)) == 1
    others = {answer_of(stack, seed=seed, max_tokens=40)["choices"][0]["text"] for seed in (8, -7, 2**63 - 1)}
    assert len(others | set(texts)) == 4


def test_f8_a_drawn_seed_can_be_given_again(stack: Stack) -> None:
    for verification in ("coupled", "rejection"):
        wish = {"verification": verification, "num_draft_tokens": 5}
        first = answer_of(stack, max_tokens=30, speculation=wish)
        assert first["speculation"]["verification"] == verification
        if verification == "coupled":
            again = answer_of(stack, max_tokens=30, speculation=wish, seed=first["speculation"]["seed"])
            assert again["choices"] == first["choices"]


@pytest.mark.parametrize("bias", [{"99999999": 5}, {"-1": 5}, {"abc": 1}, {"260": 1}, {"5": 101}])
def test_f12_f13_logit_bias_of_no_token_is_a_400_and_an_empty_one_is_none(stack: Stack, bias: dict[str, float]) -> None:
    assert refusal(stack, logit_bias=bias)["param"].startswith("logit_bias")
    assert ids_of(stack, temperature=0, max_tokens=5, logit_bias={}) == ids_of(
        stack, temperature=0, max_tokens=5, logit_bias=None
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"repetition_penalty": 100.0},
        {"repetition_penalty": 0.01},
        {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3, "min_p": 0.05, "top_k": 20},
        {"min_tokens": 20, "ignore_eos": False, "logit_bias": {str(END): 30}, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_l5_penalties_are_exact_at_drafted_positions_and_crash_nothing(
    stack: Stack, parameters: dict[str, Any], temperature: float
) -> None:
    on_and_off(stack, temperature=temperature, seed=6, max_tokens=40, **parameters)
    assert stack.readiness() == {"status": "ready", "reasons": []}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 2),
        ("temperature", 5),
        ("temperature", -1),
        ("presence_penalty", 100),
        ("frequency_penalty", -100),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e300),
        ("max_tokens", -1),
        ("max_tokens", 0.5),
        ("max_tokens", 1e12),
        ("max_tokens", "5"),
        ("max_tokens", 0),
        ("logprobs", 1_000_000),
        ("prompt_logprobs", -1),
        ("n", 100_000),
        ("stop", ""),
        ("stop_token_ids", [260]),
    ],
)
def test_f14_e14_g8_out_of_range_is_a_400_by_name_and_never_reaches_a_service(
    stack: Stack, field: str, value: object
) -> None:
    assert refusal(stack, **{field: value})["param"] == field


# --- D: stops


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("num_draft_tokens", [2, 5, 16])
def test_d6_nothing_follows_an_end_token_inside_a_draft(
    stack: Stack, temperature: float, num_draft_tokens: int
) -> None:
    """The end token is made likely, for draft and target alike, so that it is drafted and accepted with tokens
    behind it."""
    body: dict[str, Any] = {
        "temperature": temperature,
        "max_tokens": 200,
        "ignore_eos": False,
        "logit_bias": {str(END): 6},
    }
    body |= {"num_draft_tokens": num_draft_tokens, "presence_penalty": 0.5}
    lengths = set()
    for seed in range(6):
        choice = on_and_off(stack, prompt=f"{PROMPT}{seed}", seed=seed, **body)
        if choice["finish_reason"] == "stop":
            assert choice["token_ids"].index(END) == len(choice["token_ids"]) - 1
            lengths.add(len(choice["token_ids"]))
        assert "<|end|>" not in choice["text"]
    if temperature:
        assert len(lengths) > 1, "the end token never came"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_d12_text_ends_before_or_after_a_special_stop_token(stack: Stack, skip: bool, include: bool) -> None:
    """The stop token is banned until the tenth token and certain from there on."""
    body: dict[str, Any] = {
        "seed": 3,
        "max_tokens": 60,
        "min_tokens": 9,
        "stop_token_ids": [USER],
        "logit_bias": {str(USER): 100},
        "skip_special_tokens": skip,
        "include_stop_str_in_output": include,
    }
    choice = on_and_off(stack, **body)
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"].index(USER) == len(choice["token_ids"]) - 1 == 9
    assert choice["text"].endswith("<|user|>") is (include and not skip)
    assert "<|user|>" not in choice["text"].removesuffix("<|user|>")


@pytest.mark.parametrize("num_draft_tokens", [1, 5, 16])
def test_d1_d2_d5_d8_a_stop_string_ends_both_kinds_of_answer_at_the_same_place(
    stack: Stack, num_draft_tokens: int
) -> None:
    whole = answer_of(stack, seed=9, max_tokens=80)["choices"][0]["text"]
    stop = whole[30:34]
    body: dict[str, Any] = {
        "seed": 9,
        "max_tokens": 80,
        "stop": ["never this", stop],
        "num_draft_tokens": num_draft_tokens,
    }
    choice = on_and_off(stack, **body)
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"


# --- E: limits


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
def test_e3_an_empty_prompt_is_a_400_and_the_next_request_is_fine(stack: Stack, prompt: object) -> None:
    assert refusal(stack, prompt=prompt)["param"] == "prompt"
    assert len(ids_of(stack, max_tokens=3)) == 3


def test_e6_e7_e11_an_overlong_prompt_is_a_400_every_time_and_harms_nobody(stack: Stack) -> None:
    for _ in range(10):
        error = refusal(stack, prompt=[97] * 2049)
        assert error["code"] == "context_length_exceeded"
        assert "2048" in error["message"]
        assert "2049" in error["message"]
    assert len(ids_of(stack, max_tokens=8)) == 8


@pytest.mark.parametrize("num_draft_tokens", [1, 8, 16])
def test_e9_e12_the_context_is_filled_to_its_last_token_and_is_that_of_plain_decoding(
    stack: Stack, num_draft_tokens: int
) -> None:
    prompt = list(range(97, 107)) * 204  # 2,040 of 2,048 tokens
    body: dict[str, Any] = {"prompt": prompt, "seed": 2, "num_draft_tokens": num_draft_tokens}
    choice = on_and_off(stack, **body)  # 16 by default, but 8 are left
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (8, "length")


# --- F17


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_f17_drafts_that_are_always_wrong_leave_nothing_behind(
    tmp_path: Path, target_folder: Path, draft_folder: Callable[[float], Path]
) -> None:
    with Stack(folder=tmp_path, target_model=str(target_folder), draft_model=str(draft_folder(50.0))) as stack:
        for body in ({"temperature": 0}, {"temperature": 1, "seed": 1}):
            wanted = {"max_tokens": 200, "ignore_eos": True, "return_token_ids": True, **body}
            plain = stack.complete(prompt=PROMPT, **wanted, speculation=OFF)["choices"]
            wrong = stack.complete(prompt=PROMPT, **wanted, speculation={"num_draft_tokens": 8, "drafter": "model"})
            assert wrong["choices"] == plain
            assert wrong["speculation"]["drafted"] > 200  # a draft that is late on a loaded machine is left out
            assert wrong["speculation"]["acceptance_rate"] < 0.1
