"""Log-probabilities and echoed prompts, in OpenAI's shapes. The fake's score of token id i is -i / 1000."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.echo import echo_of
from gateway.logprobs import ScoredToken, chat_logprobs, completion_logprobs
from tandem.types import TokenLogprob
from tests.fakes import (
    BOS,
    END,
    START,
    VOCAB_SIZE,
    FakeFleet,
    alphabet,
    says,
    served_model,
    text_ids,
    tokens,
)
from tests.gateways import CHAT, COMPLETIONS, HELLO, gateway, official_client, text_of

TOKENIZER = served_model().tokenizer


pytestmark = pytest.mark.usefixtures("quiet_logs")


def joined(events: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The logprobs of a completion's chunks, put together."""
    whole: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in events:
        for choice in event["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                whole[name] += values
    return whole


async def test_a_completions_tokens_have_their_own_score_and_the_most_likely_ones() -> None:
    async with gateway(alphabet) as served:
        body = {"prompt": "a", "max_tokens": 3, "logprobs": 2, "speculation": {"num_draft_tokens": 4}}
        choice = (await served.post(COMPLETIONS, body)).json()["choices"][0]
        events = await served.events(COMPLETIONS, body)
    assert choice["logprobs"] == {
        "tokens": ["b", "c", "d"],
        "token_logprobs": [-0.098, -0.099, -0.1],
        # The token itself is always among them.
        "top_logprobs": [{"\x00": 0.0, "\x01": -0.001, name: value} for name, value in zip(
            "bcd", (-0.098, -0.099, -0.1), strict=True
        )],
        "text_offset": [0, 1, 2],
    }  # fmt: skip
    assert joined(events) == choice["logprobs"]
    for event in events[:-1]:
        assert "".join(event["choices"][0]["logprobs"]["tokens"]) == event["choices"][0]["text"]
    assert events[-1]["choices"][0]["logprobs"] is None  # no token came with it


@pytest.mark.parametrize("top", [0, 3])
async def test_g6_a_chats_content_is_filled_with_and_without_alternatives(top: int) -> None:
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 2, "logprobs": True}
    async with gateway(says("hé!")) as served:
        body |= {"top_logprobs": top} if top else {}
        choice = (await served.post(CHAT, {**body, "max_tokens": 9})).json()["choices"][0]
        events = await served.events(CHAT, {**body, "max_tokens": 9})
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["h", "\ufffd", "\ufffd", "!", "<|im_end|>"]
    assert [entry["logprob"] for entry in content] == [-0.104, -0.195, -0.169, -0.033, -END / 1000]
    assert [entry["bytes"] for entry in content[:4]] == [[104], [0xC3], [0xA9], [33]]
    alternatives = [{"token": chr(i), "logprob": -i / 1000, "bytes": [i]} for i in range(top)]
    assert all(entry["top_logprobs"] == alternatives for entry in content)
    chunks = [event["choices"][0]["logprobs"] for event in events]
    assert [entry for chunk in chunks if chunk for entry in chunk["content"]] == content
    assert choice["logprobs"]["refusal"] is None


async def test_without_asking_there_are_none() -> None:
    async with gateway(alphabet) as served:
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO, "max_tokens": 4})):
            assert (await served.post(path, body)).json()["choices"][0]["logprobs"] is None
            assert {event["choices"][0]["logprobs"] for event in await served.events(path, body)} == {None}
            assert served.fleet.target.starts[-1].num_logprobs is None


async def test_the_official_client_reads_them() -> None:
    async with official_client(alphabet) as (client, _):
        answer = await client.completions.create(model="tandem", prompt="a", max_tokens=2, logprobs=1)
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.token_logprobs == [-0.098, -0.099]
        chat = await client.chat.completions.create(
            model="tandem", messages=[{"role": "user", "content": "x"}], max_tokens=2, logprobs=True, top_logprobs=1
        )
        assert chat.choices[0].logprobs is not None
        assert chat.choices[0].logprobs.content is not None
        assert chat.choices[0].logprobs.content[0].top_logprobs[0].logprob == 0.0


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 16])
async def test_d4_log_probabilities_end_at_the_stop_streaming_or_not(num_draft_tokens: int) -> None:
    async with gateway(alphabet) as served:
        body = {
            "prompt": "a",
            "max_tokens": 50,
            "stop": "ef",
            "logprobs": 2,
            "return_token_ids": True,
            "speculation": {"num_draft_tokens": num_draft_tokens},
        }
        choice = (await served.post(COMPLETIONS, body)).json()["choices"][0]
        events = await served.events(COMPLETIONS, body)
    assert choice["text"] == "bcd"
    assert choice["token_ids"] == [*b"bcdef"]
    assert choice["logprobs"]["tokens"] == [*"bcdef"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 3]
    assert joined(events) == choice["logprobs"]


def test_a10_alternatives_are_decoded_each_on_its_own() -> None:
    score = TokenLogprob(-1.0, ((0xC3, -0.5), (0xA9, -0.75), (START, -0.8), (97, -1.0)))
    scored = [ScoredToken(97, 0, score)]
    (top,) = completion_logprobs(TOKENIZER, scored)["top_logprobs"]
    assert top == {"bytes:\\xc3": -0.5, "bytes:\\xa9": -0.75, "<|im_start|>": -0.8, "a": -1.0}
    (entry,) = chat_logprobs(TOKENIZER, scored)["content"]
    assert [(t["token"], t["bytes"]) for t in entry["top_logprobs"][:2]] == [("\ufffd", [0xC3]), ("\ufffd", [0xA9])]
    assert all(alternative["token"] for alternative in entry["top_logprobs"])


def test_what_is_impossible_has_a_finite_score_and_an_id_without_token_a_name() -> None:
    scored = [ScoredToken(98, 0, TokenLogprob(float("-inf"), ((97, 0.0), (VOCAB_SIZE + 5, float("-inf")))))]
    written = completion_logprobs(TOKENIZER, scored)
    assert written["token_logprobs"] == [-9999.0]
    assert written["top_logprobs"] == [{"a": 0.0, "token_id:271": -9999.0, "b": -9999.0}]
    (entry,) = chat_logprobs(TOKENIZER, scored)["content"]
    assert entry["logprob"] == -9999.0
    assert entry["top_logprobs"][1] == {"token": "token_id:271", "logprob": -9999.0, "bytes": []}


# --- echo


@pytest.mark.parametrize("prompt", ["ab", [BOS, 97, 98]])
async def test_echo_puts_the_prompt_in_front_with_its_scores(prompt: object) -> None:
    """The first token has no score, as nothing precedes it."""
    body = {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 1, "return_token_ids": True}
    async with gateway(alphabet) as served:
        choice = (await served.post(COMPLETIONS, body)).json()["choices"][0]
        events = await served.events(COMPLETIONS, body)
    assert choice["text"] == text_of(events) == "abcd"
    assert choice["logprobs"] == {
        "tokens": ["<|bos|>", "a", "b", "c", "d"],
        "token_logprobs": [None, -0.097, -0.098, -0.099, -0.1],
        "top_logprobs": [None, *({"\x00": 0.0, name: -ord(name) / 1000} for name in "abcd")],
        "text_offset": [0, 0, 1, 2, 3],
    }
    assert joined(events) == choice["logprobs"]
    assert events[0]["choices"][0]["text"] == "abc"  # the prompt comes with the first text
    assert choice["prompt_token_ids"] == [BOS, 97, 98]
    assert choice["token_ids"] == [99, 100]


@pytest.mark.parametrize("prompt", ["ab", [BOS, 97, 98]])
async def test_a_prompt_is_scored_without_an_answer(prompt: object) -> None:
    """What lm-evaluation-harness sends: max_tokens 0, echo, logprobs 1."""
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    async with gateway(alphabet) as served:
        answer = (await served.post(COMPLETIONS, body)).json()
        events = await served.events(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        assert await served.metric("tandem_generation_tokens_total") == 0
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.097, -0.098]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3} == events[-1]["usage"]
    assert text_of(events) == "ab"
    assert joined(events) == choice["logprobs"]
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_a_prompt_of_one_token_has_no_score() -> None:
    async with gateway(alphabet) as served:
        body = {"prompt": [97], "max_tokens": 0, "echo": True, "logprobs": 0}
        choice = (await served.post(COMPLETIONS, body)).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]
    }  # fmt: skip


async def test_echo_without_logprobs_asks_the_target_for_none() -> None:
    async with gateway(alphabet) as served:
        answer = (await served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2, "echo": True})).json()
        start = served.fleet.target.starts[0]
    assert answer["choices"][0]["text"] == "abc"
    assert (start.num_logprobs, start.prompt_logprobs) == (None, False)


async def test_every_answer_to_every_prompt_begins_with_its_own_prompt() -> None:
    body = {"prompt": ["a", "x"], "n": 2, "max_tokens": 2, "echo": True, "logprobs": 0}
    async with gateway(alphabet) as served:
        choices = (await served.post(COMPLETIONS, body)).json()["choices"]
        starts = served.fleet.target.starts
    assert [choice["text"] for choice in choices] == ["abc", "abc", "xyz", "xyz"]
    assert [choice["logprobs"]["token_logprobs"][1] for choice in choices] == [-0.097, -0.097, -0.12, -0.12]
    assert sum(start.prompt_logprobs for start in starts) == 2  # each prompt is scored once


async def test_stop_strings_are_looked_for_in_the_answer_only() -> None:
    async with gateway(alphabet) as served:
        body = {"prompt": "ab", "max_tokens": 5, "echo": True, "stop": ["b", "bc", "e"]}
        choice = (await served.post(COMPLETIONS, body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abcd", "stop")


@pytest.mark.parametrize("body", [{"logprobs": 0}, {"logprobs": 0, "echo": True, "max_tokens": 0}])
async def test_scores_that_the_target_leaves_out_are_a_500_not_a_null(body: dict[str, Any]) -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.sends_scores = False
    async with gateway(fleet) as served:
        assert (await served.post(COMPLETIONS, {"prompt": "ab", **body})).status_code == 500


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ("ab", (0, 0, 1)),
        ("é!", (0, 0, 1)),  # the merge Ã © is one token here
        ("a<|im_end|>b", (0, 0, 1, 11)),
        (" the", (0, 0)),
        ("漢a", (0, 0, 0, 0, 1)),  # three tokens of one byte each
    ],
)
def test_offsets_say_where_in_the_text_a_token_begins(text: str, offsets: tuple[int, ...]) -> None:
    echo = echo_of(TOKENIZER, (BOS, *text_ids(text)), given=text)
    assert (echo.text, echo.offsets) == (text, offsets)


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "<|bos|>a<|im_end|>b")])
def test_an_echo_of_ids_shows_special_tokens_where_they_are_not_skipped(skip: bool, text: str) -> None:
    assert echo_of(TOKENIZER, (BOS, 97, END, 98), given=None, skip_special_tokens=skip).text == text


def test_an_echo_of_half_a_character_ends_with_a_replacement() -> None:
    assert echo_of(TOKENIZER, (97, 0xC3), given=None).text == "a\ufffd"


async def test_the_text_of_special_tokens_in_an_answer_has_its_offset() -> None:
    async with gateway(tokens(97, START, 98)) as served:
        body = {"prompt": "x", "max_tokens": 3, "logprobs": 0, "skip_special_tokens": False}
        shown = (await served.post(COMPLETIONS, body)).json()["choices"][0]
        hidden = (await served.post(COMPLETIONS, {**body, "skip_special_tokens": True})).json()["choices"][0]
    assert (shown["text"], shown["logprobs"]["text_offset"]) == ("a<|im_start|>b", [0, 1, 13])
    assert (hidden["text"], hidden["logprobs"]["text_offset"]) == ("ab", [0, 1, 1])
