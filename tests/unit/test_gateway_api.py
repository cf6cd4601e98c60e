"""The gateway over a real socket, with scripted services behind it: what clients send, and what they see."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator, MutableMapping
from typing import Any

import httpx
import openai
import orjson
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.__main__ import build_server
from gateway.admission import Admission, Grant
from gateway.generate import Generation
from gateway.jobs import Job, JobMaker
from gateway.kv_room import AnswerSize, Replica
from gateway.metrics import GatewayMetrics
from gateway.schemas import ChatBody, CompletionBody
from gateway.served import Readiness
from gateway.settings import Settings
from gateway.tokenizer import Tokenizer
from tandem.errors import InvalidRequest, TimedOut, Unavailable
from tandem.types import KvCache
from tests.fakes import (
    BOS,
    CONTEXT_LENGTH,
    END,
    MODEL_ID,
    START,
    VOCAB_SIZE,
    FakeFleet,
    alphabet,
    eventually,
    says,
    served_model,
    text_ids,
    tokenizer_files,
    tokens,
)
from tests.gateways import (
    CHAT,
    COMPLETIONS,
    HELLO,
    build,
    gateway,
    listening_gateway,
    official_client,
    open_stream,
    text_of,
)


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


# --- the official client


async def test_the_official_client_reads_a_completion() -> None:
    async with official_client(alphabet) as (client, _):
        answer = await client.completions.create(model="tandem", prompt="a", max_tokens=5)
    assert answer.choices[0].text == "bcdef"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.model == "tandem"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 5)  # BOS and a


async def test_the_official_client_reads_a_chat() -> None:
    async with official_client(says("hello")) as (client, _):
        answer = await client.chat.completions.create(model=MODEL_ID, messages=[{"role": "user", "content": "x"}])
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6  # five letters and the end token


async def test_b7_b8_the_official_client_streams_a_chat_with_usage() -> None:
    async with official_client(says("hello")) as (client, _):
        stream = await client.chat.completions.create(
            model="tandem",
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.created for chunk in chunks} == {chunks[0].created}
    assert {chunk.model for chunk in chunks} == {"tandem"}
    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == ["assistant", *[None] * (len(chunks) - 2)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [*[None] * (len(chunks) - 2), "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


async def test_the_official_clients_stream_helper_reads_a_chat() -> None:
    async with official_client(says("hello")) as (client, _):
        async with client.chat.completions.stream(
            model="tandem", messages=[{"role": "user", "content": "x"}]
        ) as stream:
            answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == "hello"


async def test_i5_i6_the_official_client_gets_404_and_400_with_the_message_kept() -> None:
    async with official_client(alphabet) as (client, _):
        with pytest.raises(openai.NotFoundError, match="'nope' does not exist") as unknown:
            await client.completions.create(model="nope", prompt="a")
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError, match="top_p") as bad:
            await client.completions.create(model="tandem", prompt="a", top_p=0)
        assert bad.value.param == "top_p"
        assert bad.value.request_id


async def test_b13_a_failure_in_mid_stream_raises_in_the_official_client() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.fail_at = (6, TimedOut("the target did not answer"))
    async with official_client(fleet) as (client, served):
        stream = await client.completions.create(model="tandem", prompt="a", max_tokens=50, stream=True)
        seen = ""
        with pytest.raises(openai.APIError, match="did not answer") as failure:  # noqa: PT012
            async for chunk in stream:
                seen += chunk.choices[0].text
        assert failure.value.code == "timeout"
        assert seen == "bcdefg"
        assert await served.metric("tandem_requests_total", finish_reason="error") == 1
        # J15: and the next request is fine.
        fleet.target.fail_at = None
        await client.completions.create(model="tandem", prompt="a", max_tokens=5)


# --- shapes


async def test_b4_b5_b10_every_chunk_has_a_finish_reason_and_only_the_last_a_value() -> None:
    async with gateway(alphabet) as served:
        for path, body in (
            (COMPLETIONS, {"prompt": "a", "max_tokens": 9}),
            (CHAT, {"messages": HELLO, "max_tokens": 9}),
        ):
            events = await served.events(path, body)
            choices = [event["choices"][0] for event in events]
            assert [choice["finish_reason"] for choice in choices] == [*[None] * (len(choices) - 1), "length"]
            last = choices[-1]
            assert last.get("text", "") == "" == last.get("delta", {}).get("content", "")
            assert all("usage" not in event for event in events)


async def test_d11_no_chunk_in_between_is_without_text() -> None:
    async with gateway(says("a ST b STO c")) as served:
        events = await served.events(COMPLETIONS, {"prompt": "a", "stop": ["STOP"], "max_tokens": 99})
        assert all(event["choices"][0]["text"] for event in events[:-1])
        assert text_of(events) == "a ST b STO c"


async def test_c1_c4_c5_b15_usage_comes_once_in_a_chunk_of_its_own_and_equals_the_documents() -> None:
    async with gateway(says("hello")) as served:
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
            document = (await served.post(path, body)).json()
            events = await served.events(path, {**body, "stream_options": {"include_usage": True}})
            assert [event["usage"] for event in events] == [*[None] * (len(events) - 1), document["usage"]]
            assert events[-1]["choices"] == []
            assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_continuous_usage_counts_what_has_been_sent() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with gateway(alphabet) as served:
        body = {"prompt": "a", "max_tokens": 6, "return_token_ids": True, "stream_options": options}
        events = await served.events(COMPLETIONS, body)
    sent = 0
    for event in events[:-1]:
        sent += len(event["choices"][0]["token_ids"])
        assert event["usage"]["completion_tokens"] == sent
    assert events[-1]["usage"]["completion_tokens"] == sent == 6


@pytest.mark.parametrize("stop", [None, "hij", ["zzz", "ij"]])
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 16])
async def test_d2_a7_c5_stream_and_document_say_the_same(stop: object, num_draft_tokens: int) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 15,
        "stop": stop,
        "return_token_ids": True,
        "speculation": {"num_draft_tokens": num_draft_tokens, "trace": True},
    }
    async with gateway(FakeFleet.following(alphabet, wrong_at=lambda position: position % 5 == 3)) as served:
        document = (await served.post(COMPLETIONS, body)).json()["choices"][0]
        events = await served.events(COMPLETIONS, body)
        plain = (await served.post(COMPLETIONS, {**body, "speculation": {"enabled": False}})).json()["choices"][0]
    choices = [event["choices"][0] for event in events]
    assert text_of(events) == document["text"] == plain["text"]
    assert document["text"] == ("bcdefghijklmnop" if stop is None else "bcdefg" if stop == "hij" else "bcdefgh")
    assert [i for choice in choices for i in choice["token_ids"]] == document["token_ids"] == plain["token_ids"]
    assert [t for choice in choices for t in choice["trace"]] == document["trace"]
    assert "".join(token["text"] for token in document["trace"]) == document["text"]
    assert choices[-1]["finish_reason"] == document["finish_reason"] == ("length" if stop is None else "stop")


async def test_d4_d5_d8_everything_ends_at_a_stop_in_the_middle_of_a_long_draft() -> None:
    async with gateway(alphabet) as served:
        body = {
            "prompt": "a",
            "max_tokens": 50,
            "stop": "ef",
            "return_token_ids": True,
            "speculation": {"num_draft_tokens": 16, "trace": True},
        }
        answer = (await served.post(COMPLETIONS, body)).json()
        wasted = await served.metric("tandem_wasted_draft_tokens_total")
    choice = answer["choices"][0]
    assert choice["text"] == "bcd"
    assert choice["token_ids"] == [*b"bcdef"]
    assert [token["token_id"] for token in choice["trace"]] == [*b"bcdef"]
    assert answer["usage"]["completion_tokens"] == 5
    # Round 0: b. Round 1: sixteen drafted and accepted, of which c d e f are in the answer.
    assert answer["speculation"]["accepted"] == 16
    assert wasted == 12
    rounds = answer["speculation"]["round_trace"]
    assert [(each["prefill"], each["drafted"], each["accepted"]) for each in rounds] == [(True, 0, 0), (False, 16, 16)]
    for stage in ("draft_seconds", "verify_seconds", "network_seconds"):
        assert sum(each[stage] for each in rounds) == pytest.approx(answer["speculation"][stage])


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
async def test_d12_stop_token_ids_cut_text_the_same_with_and_without_speculation(skip: bool, include: bool) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 20,
        "stop_token_ids": [START],
        "skip_special_tokens": skip,
        "include_stop_str_in_output": include,
        "return_token_ids": True,
    }
    async with gateway(tokens(*b"abcdef", START, *b"ghi")) as served:
        for enabled in (True, False):
            answer = (await served.post(COMPLETIONS, {**body, "speculation": {"enabled": enabled}})).json()
            assert answer["choices"][0]["text"] == "abcdef" + ("<|im_start|>" if include and not skip else "")
            assert answer["choices"][0]["token_ids"] == [*b"abcdef", START]
            assert answer["choices"][0]["finish_reason"] == "stop"


async def test_d6_nothing_follows_the_end_token() -> None:
    async with gateway(says("ab")) as served:
        answer = (await served.post(COMPLETIONS, {"prompt": "a", "return_token_ids": True})).json()
        ignoring = (await served.post(COMPLETIONS, {"prompt": "a", "ignore_eos": True, "max_tokens": 7})).json()
    assert answer["choices"][0]["token_ids"] == [*b"ab", END]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert ignoring["usage"]["completion_tokens"] == 7
    assert ignoring["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("text", ["héllo ✓ 世界 🙂 done", "🙂🙂🙂", "\U0001f468‍\U0001f469‍\U0001f467"])
async def test_a1_a4_text_of_many_bytes_streams_whole(text: str) -> None:
    async with gateway(says(text)) as served:
        body = {"prompt": "a", "max_tokens": 100}
        events = await served.events(COMPLETIONS, body)
        assert text_of(events) == text == (await served.post(COMPLETIONS, body)).json()["choices"][0]["text"]
        assert not any("\ufffd" in event["choices"][0]["text"] for event in events)


async def test_a2_invalid_bytes_do_not_stall_a_stream() -> None:
    async with gateway(tokens(0x61, 0xE4, 0xFF, 0x62, 0xF0, 0x9F)) as served:
        body = {"prompt": "a", "max_tokens": 6}
        events = await served.events(COMPLETIONS, body)
        assert text_of(events) == "a\ufffd\ufffdb\ufffd"
        assert (await served.post(COMPLETIONS, body)).json()["choices"][0]["text"] == text_of(events)


async def test_the_speculation_report_adds_up() -> None:
    fleet = FakeFleet.following(alphabet, wrong_at=lambda position: position % 3 == 2)
    fleet.drafts.num_bytes = 10
    async with gateway(fleet) as served:
        body = {"prompt": "a", "max_tokens": 8, "seed": 7, "speculation": {"num_draft_tokens": 3}}
        report = (await served.post(COMPLETIONS, body)).json()["speculation"]
        events = await served.events(COMPLETIONS, body)
        drafted = await served.metric("tandem_spec_decode_num_draft_tokens_total")
        accepted = await served.metric("tandem_spec_decode_num_accepted_tokens_total")
    # b | c D e | e f G | h i, as in test_speculate: drafted 3 + 3 + 1, accepted 1 + 2 + 1 of them.
    assert (report["rounds"], report["draftless_rounds"]) == (4, 1)
    assert (report["drafted"], report["accepted"]) == (7, 4)
    assert report["acceptance_rate"] == 4 / 7
    assert report["acceptance_length"] == 8 / 4
    assert report["accepted_per_position"] == [3, 1, 0]
    assert report["seed"] == 7
    assert report["bytes_sent"] == 70
    streamed = [event["speculation"] for event in events if "speculation" in event]
    assert [{**r, "network_seconds": 0} for r in streamed] == [{**report, "network_seconds": 0}]
    assert "speculation" in events[-1]
    assert (drafted, accepted) == (14, 8)  # K1: of both requests


async def test_a_seed_is_drawn_and_named_where_none_is_given() -> None:
    async with gateway(alphabet) as served:
        seeds = [(await served.post(COMPLETIONS, {"prompt": "a"})).json()["speculation"]["seed"] for _ in range(2)]
        assert seeds[0] != seeds[1]
        assert all(0 <= seed < 2**63 for seed in seeds)
        assert [start.seed for start in served.fleet.target.starts] == seeds
        await served.post(COMPLETIONS, {"prompt": "a", "seed": -1})
        assert served.fleet.target.starts[-1].seed == 2**64 - 1


async def test_prompt_ids_stand_where_vllm_has_them() -> None:
    async with gateway(alphabet) as served:
        body = {"max_tokens": 3, "return_token_ids": True}
        completion = {"prompt": "ab", **body}
        chat = {"messages": HELLO, **body}
        ids = [BOS, *b"ab"]
        assert (await served.post(COMPLETIONS, completion)).json()["choices"][0]["prompt_token_ids"] == ids
        events = await served.events(COMPLETIONS, completion)
        assert [event["choices"][0].get("prompt_token_ids") for event in events] == [ids, *[None] * (len(events) - 1)]
        document = (await served.post(CHAT, chat)).json()
        assert document["prompt_token_ids"][0] == BOS
        events = await served.events(CHAT, chat)
        assert [event.get("prompt_token_ids") for event in events] == [
            document["prompt_token_ids"],
            *[None] * (len(events) - 1),
        ]


# --- prompts


async def test_h3_a_prompt_has_one_beginning_of_text() -> None:
    async with gateway(alphabet) as served:
        await served.post(COMPLETIONS, {"prompt": "ab"})
        await served.post(COMPLETIONS, {"prompt": "ab", "add_special_tokens": False})
        await served.post(COMPLETIONS, {"prompt": [1, 2]})
        await served.post(CHAT, {"messages": HELLO})
    given = [start.token_ids for start in served.fleet.target.starts]
    chat = (BOS, START, *text_ids("user:hi"), END, START, *text_ids("assistant:"))
    assert given == [(BOS, *b"ab"), (*b"ab",), (1, 2), chat]


async def test_several_prompts_give_several_choices_in_order() -> None:
    async with gateway(alphabet) as served:
        for prompt in (["a", "d", "x"], [[97], [100], [120]]):
            body = {"prompt": prompt, "max_tokens": 4, "return_token_ids": True}
            answer = (await served.post(COMPLETIONS, body)).json()
            assert [choice["text"] for choice in answer["choices"]] == ["bcde", "efgh", "yzab"]
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
            assert answer["usage"]["completion_tokens"] == 12
            # B1: one [DONE], which `events` asserts.
            events = await served.events(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
            assert [text_of(events, index=index) for index in range(3)] == ["bcde", "efgh", "yzab"]
            assert events[-1]["usage"] == answer["usage"]
            assert sum("speculation" in event for event in events) == 1


async def test_one_failing_prompt_fails_its_request_and_ends_the_others() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.fail_at = (5, Unavailable("gone"))
    async with gateway(fleet) as served:
        response = await served.post(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 50})
        assert response.status_code == 503


@pytest.mark.parametrize("prompt", [[VOCAB_SIZE], [-1], [[1], [VOCAB_SIZE]], [10**12]])
async def test_token_ids_outside_the_vocabulary_are_refused(prompt: object) -> None:
    async with gateway(alphabet) as served:
        response = await served.post(COMPLETIONS, {"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("field", "value"), [("logit_bias", {"99999999": 5}), ("stop_token_ids", [VOCAB_SIZE]), ("logit_bias", {"266": 1})]
)
async def test_f12_ids_in_parameters_outside_the_vocabulary_are_refused(field: str, value: object) -> None:
    async with gateway(alphabet) as served:
        response = await served.post(COMPLETIONS, {"prompt": "a", field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


async def test_sampling_parameters_reach_both_services_as_they_are() -> None:
    body = {
        "prompt": "a",
        "temperature": 0.5,
        "top_k": -1,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100},
        "min_tokens": 2,
        "stop_token_ids": [7],
    }
    async with gateway(alphabet) as served:
        await served.post(COMPLETIONS, body)
    sampling = served.fleet.target.starts[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 0, 0.9, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert sampling.logit_bias == ((5, -100.0),)
    assert sampling.min_tokens == 2
    assert sampling.end_token_ids == (7, END)


async def test_h5_h6_a_template_that_refuses_the_messages_is_a_400_with_its_words() -> None:
    async with gateway(alphabet) as served:
        twice = await served.post(CHAT, {"messages": HELLO * 2})
        assert (twice.status_code, twice.json()["error"]["message"]) == (400, "roles must alternate")
        role = await served.post(CHAT, {"messages": [{"role": "wizard", "content": "x"}]})
        assert (role.status_code, role.json()["error"]["message"]) == (400, "unknown role wizard")


@pytest.mark.parametrize("template", [None, "{% if %}"])
async def test_h7_without_a_usable_chat_template_chats_are_a_400_and_completions_work(template: str | None) -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.model = served_model(chat_template=template)
    async with gateway(fleet) as served:
        response = await served.post(CHAT, {"messages": HELLO})
        assert response.status_code == 400
        assert "chat template" in response.json()["error"]["message"]
        assert (await served.post(COMPLETIONS, {"prompt": "a"})).status_code == 200


def test_chat_templates_have_what_transformers_gives_them() -> None:
    template = (
        "{% for m in messages %}\n"
        "    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }} {{ dict(a=1)['a'] }} {{ strftime_now('%%') }}"
        "{{ eos_token }}{{ extra }}{{ bos_token if tools is none }}"
    )
    tokenizer = Tokenizer.from_files(tokenizer_files(chat_template=template))
    messages = [{"role": "skip"}, {"role": "user", "content": "<é>"}]
    text = tokenizer.render_chat(messages, add_generation_prompt=False, variables={"extra": "!", "bos_token": "mine"})
    assert text == '{"role": "user", "content": "<é>"}2 1 %<|im_end|>!<|bos|>'


@pytest.mark.parametrize("source", ["{{ messages.__class__ }}{{ ''.__class__.mro() }}", "{{ namespace(_x=1) }}"])
def test_chat_templates_stay_in_their_sandbox(source: str) -> None:
    tokenizer = Tokenizer.from_files(tokenizer_files(chat_template=source))
    with pytest.raises(InvalidRequest):
        tokenizer.render_chat([], add_generation_prompt=False)


def test_a_template_may_come_in_the_tokenizers_configuration() -> None:
    files = tokenizer_files(chat_template=None)
    for entry in ("{{ 1 }}", [{"name": "tool_use", "template": "{{ 2 }}"}, {"name": "default", "template": "{{ 1 }}"}]):
        files["tokenizer_config.json"] = orjson.dumps({"chat_template": entry})
        assert Tokenizer.from_files(files).render_chat([], add_generation_prompt=True) == "1"


def test_a_tokenizer_knows_its_special_ids_and_size() -> None:
    tokenizer = Tokenizer.from_files(tokenizer_files())
    assert tokenizer.special_token_ids == {"bos_token": BOS, "eos_token": END}
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.is_special(END)
    for files in ({}, {"tokenizer.json": b"{}"}):
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            Tokenizer.from_files(files)


async def test_tokenising_a_long_prompt_leaves_the_event_loop_free() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    async with gateway(alphabet) as served:
        ticking = asyncio.create_task(tick())
        response = await served.post(COMPLETIONS, {"prompt": "the quick brown fox " * 20_000})
        ticking.cancel()
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert ticks >= 5  # with the interpreter's lock held it is none or one


# --- limits


@pytest.mark.parametrize("max_tokens", range(1, 11))
async def test_c7_exactly_max_tokens_are_delivered(max_tokens: int) -> None:
    async with gateway(says("ab")) as served:
        body = {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
        answer = (await served.post(COMPLETIONS, body)).json()
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"] == max_tokens


async def test_e1_completions_have_16_tokens_by_default_and_chats_fill_the_context() -> None:
    async with gateway(alphabet) as served:
        for body in ({"prompt": "a"}, {"prompt": "a", "max_tokens": None}):
            assert (await served.post(COMPLETIONS, body)).json()["usage"]["completion_tokens"] == 16
        chat = (await served.post(CHAT, {"messages": HELLO})).json()
        assert chat["usage"]["total_tokens"] == CONTEXT_LENGTH
        assert chat["choices"][0]["finish_reason"] == "length"


async def test_e5_max_completion_tokens_is_honoured_on_completions() -> None:
    async with gateway(alphabet) as served:
        answer = await served.post(COMPLETIONS, {"prompt": "a", "max_completion_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("num_tokens", [CONTEXT_LENGTH - 1, CONTEXT_LENGTH, 10 * CONTEXT_LENGTH, 300_000])
async def test_e6_e7_an_overlong_prompt_is_always_a_400_with_counts(num_tokens: int) -> None:
    async with gateway(alphabet, max_prompt_chars=200_000) as served:
        for path, body in (
            (COMPLETIONS, {"prompt": "a" * num_tokens}),
            (CHAT, {"messages": [{"role": "user", "content": "a" * num_tokens}]}),
        ):
            for stream in (False, True):
                response = await served.post(path, {**body, "stream": stream})
                assert response.status_code == 400
                error = response.json()["error"]
                assert error["code"] == "context_length_exceeded"
                assert str(CONTEXT_LENGTH) in error["message"]
                assert "aaa" not in error["message"]
        assert served.fleet.target.starts == []


async def test_e6_max_tokens_beyond_the_context_is_a_400_with_counts() -> None:
    async with gateway(alphabet) as served:
        error = (await served.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 510})).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "513" in error["message"]
        assert (await served.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 10**12})).status_code == 400
        assert (await served.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 509})).status_code == 200


@pytest.mark.parametrize("num_draft_tokens", [4, 16])
async def test_e9_e12_drafts_fit_into_what_is_left_of_the_context(num_draft_tokens: int) -> None:
    async with gateway(alphabet) as served:
        body = {"prompt": [97] * (CONTEXT_LENGTH - 8), "speculation": {"num_draft_tokens": num_draft_tokens}}
        answer = (await served.post(COMPLETIONS, body)).json()
    assert answer["usage"]["completion_tokens"] == 8  # the default of 16 is cut to the room there is
    assert max(served.fleet.drafts.asked) <= 6  # 8 left, 1 for the first token, 1 for the target's own


async def test_max_prompt_tokens_is_a_limit_of_its_own() -> None:
    async with gateway(alphabet, max_prompt_tokens=10) as served:
        response = await served.post(COMPLETIONS, {"prompt": [1] * 11})
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert (await served.post(COMPLETIONS, {"prompt": [97] * 10})).status_code == 200


async def test_min_tokens_above_the_default_max_tokens_is_refused() -> None:
    async with gateway(alphabet) as served:
        assert (await served.post(COMPLETIONS, {"prompt": "a", "min_tokens": 17})).json()["error"][
            "param"
        ] == "min_tokens"


# --- speculation


async def test_speculation_can_be_switched_off() -> None:
    async with gateway(alphabet) as served:
        answer = (await served.post(COMPLETIONS, {"prompt": "a", "speculation": {"enabled": False}})).json()
    assert answer["speculation"]["drafted"] == 0
    assert answer["speculation"]["acceptance_rate"] is None
    assert served.fleet.drafts.drafters == []


async def test_num_draft_tokens_is_bounded_by_the_settings_and_by_the_draft_service() -> None:
    async with gateway(alphabet, max_num_draft_tokens=8) as served:
        body = {"prompt": "a", "max_tokens": 60}
        response = await served.post(COMPLETIONS, {**body, "speculation": {"num_draft_tokens": 9}})
        assert response.json()["error"]["param"] == "speculation.num_draft_tokens"
        await served.post(COMPLETIONS, {**body, "speculation": {"num_draft_tokens": 8}})
        await served.post(COMPLETIONS, {**body, "speculation": {"num_draft_tokens": "auto"}})
    assert set(served.fleet.drafts.asked) >= {8, 4}
    assert max(served.fleet.drafts.asked) == 8


async def test_a_drafter_is_asked_for_by_name() -> None:
    async with gateway(alphabet) as served:
        for name in ("auto", "ngram"):
            await served.post(COMPLETIONS, {"prompt": "a", "speculation": {"drafter": name}})
        assert served.fleet.drafts.drafters == ["", "ngram"]
        unknown = {"prompt": "a", "speculation": {"drafter": "nope"}}
        response = await served.post(COMPLETIONS, unknown)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "speculation.drafter")
        served.fleet.draft_info = None  # no draft service is known: nothing to compare with
        assert (await served.post(COMPLETIONS, unknown)).status_code == 200


# --- errors


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("content", [b'{"model": x}', b"", b"{", b"\xff", b'{"prompt": NaN}', b"[" * 5000])
async def test_i1_malformed_json_is_a_400(path: str, content: bytes) -> None:
    async with gateway(alphabet) as served:
        response = await served.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("content", [b"[]", b"null", b"123", b'"s"', b"true"])
async def test_i2_a_body_that_is_no_object_is_a_400(content: bytes) -> None:
    async with gateway(alphabet) as served:
        response = await served.http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "object" in response.json()["error"]["message"]


async def test_half_a_character_in_json_is_a_400() -> None:
    async with gateway(alphabet) as served:
        response = await served.http.post(
            COMPLETIONS, content=b'{"prompt": "\\ud800"}', headers={"content-type": "application/json"}
        )
    assert response.status_code == 400


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_is_not_declared_as_json_is_a_415(content_type: str) -> None:
    async with listening_gateway(alphabet) as served:
        headers = {"content-type": content_type} if content_type else {}
        response = await served.http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=10)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "tools", "response_format", "unknown"})


@settings(max_examples=8, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3), min_size=12, max_size=12))
async def test_i7_no_body_whatsoever_is_a_5xx(bodies: list[dict[str, object]]) -> None:
    async with gateway(says("hello")) as served:
        for number, changes in enumerate(bodies):  # many for one application, which takes longer to build than to ask
            path, valid = ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO}))[number % 2]
            response = await served.http.post(
                path, content=json.dumps({**valid, **changes}), headers={"content-type": "application/json"}
            )
            assert response.status_code in (200, 400, 404), (changes, response.text)
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_i6_unknown_paths_and_methods_have_openais_body() -> None:
    async with gateway(alphabet) as served:
        for response, status in (
            (await served.http.get("/", headers={"accept": "application/json"}), 404),
            (await served.http.get("/nope"), 404),
            (await served.http.get(COMPLETIONS), 405),
            (await served.http.delete("/v1/models"), 405),
        ):
            assert response.status_code == status
            assert response.json()["error"]["message"]
            assert response.headers["x-request-id"]


async def test_a_body_over_the_limit_is_a_413_before_it_is_parsed() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100

    async with listening_gateway(alphabet, max_body_bytes=1000) as served:
        for path in (COMPLETIONS, "/nope"):
            response = await served.http.post(path, content=b"x" * 1001)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
        with contextlib.suppress(httpx.WriteError):  # the server may close before all is written
            assert (await served.http.post(COMPLETIONS, content=chunks())).status_code == 413
        assert (await served.post(COMPLETIONS, {"prompt": "a"})).status_code == 200


async def test_a_body_that_does_not_arrive_is_given_up() -> None:
    async with listening_gateway(alphabet, body_timeout_seconds=0.1) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 408")


async def test_a_fault_of_our_own_is_a_500_without_details(logs: list[MutableMapping[str, Any]]) -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.fail_at = (0, KeyError("secret"))
    async with gateway(fleet) as served:
        response = await served.post(COMPLETIONS, {"prompt": "a"})
        assert response.status_code == 500
        assert "secret" not in response.text
        assert response.headers["x-request-id"] in response.json()["error"]["message"]
    failures = [entry for entry in logs if entry["event"] == "request_failed"]
    assert [(entry["error"], entry["log_level"]) for entry in failures] == [("KeyError", "error")]


async def test_logs_say_how_requests_went_and_nothing_of_what_they_said(logs: list[MutableMapping[str, Any]]) -> None:
    async with gateway(says("open sesame")) as served:
        await served.post(COMPLETIONS, {"prompt": "sesame", "user": "sesame"})
        await served.events(CHAT, {"messages": [{"role": "user", "content": "sesame"}]})
        await served.http.get("/sesame?key=sesame", headers={"authorization": "Bearer sesame"})
        await served.post(COMPLETIONS, {"prompt": ["sesame", 5]})
        await served.post(CHAT, {"messages": [{"role": "sesame", "content": "sesame"}]})
    entries = [entry for entry in logs if entry["event"] == "request"]
    assert [(entry["route"], entry["status"]) for entry in entries] == [
        (COMPLETIONS, 200),
        (CHAT, 200),
        ("other", 404),
        (COMPLETIONS, 400),
        (CHAT, 400),
    ]
    assert "sesame" not in repr(logs)


async def test_a_target_that_is_down_is_a_503_streaming_or_not() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.fail_at = (0, Unavailable("target 127.0.0.1:1: not reached yet"))
    async with gateway(fleet) as served:
        for stream in (False, True):
            response = await served.post(COMPLETIONS, {"prompt": "a", "stream": stream})
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
        fleet.model = None
        assert (await served.http.get("/v1/models")).status_code == 503


async def test_the_request_id_is_the_clients_where_that_is_harmless() -> None:
    async with gateway(alphabet) as served:
        for given, kept in (("abc-1.2_3:4", True), ("x" * 129, False), ("a b", False), ("é", False), ("", False)):
            headers = [(b"x-request-id", given.encode())]
            response = await served.http.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
            assert (response.headers["x-request-id"] == given) is kept
            assert served.fleet.target.starts[-1].request_id == response.headers["x-request-id"]


# --- disconnects, limits on concurrency, time


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_j1_j2_a_client_that_leaves_before_the_first_token_stops_both_services(path: str, stream: bool) -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()  # a prefill without end
    async with listening_gateway(fleet) as served:
        body = {"prompt": "a"} if path == COMPLETIONS else {"messages": HELLO}
        async with httpx.AsyncClient(base_url=served.url) as http:
            task = asyncio.create_task(http.post(path, json={**body, "max_tokens": 50, "stream": stream}))
            await eventually(lambda: fleet.target.num_open == fleet.drafts.num_open == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: fleet.target.num_open == fleet.drafts.num_open == 0)
        assert await served.metric("tandem_requests_total", finish_reason="cancelled") == 1
        assert await served.metric("tandem_http_requests_total", route=path, status="4xx") == 1  # nginx's 499


async def test_j1_a_client_that_leaves_stops_all_answers_to_its_request() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.seconds = 0.01
    async with listening_gateway(fleet) as served:
        async with open_stream(served, COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 400}) as response:
            await anext(response.aiter_lines())
            assert fleet.target.num_open == 3
        await eventually(lambda: fleet.target.num_open == fleet.drafts.num_open == 0)
        assert await served.metric("tandem_requests_total", finish_reason="cancelled") == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_j1_a_client_that_leaves_in_the_middle_stops_both_services(stream: bool) -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.seconds = 0.02
    async with listening_gateway(fleet) as served:
        body = {"prompt": "a", "max_tokens": 400, "speculation": {"num_draft_tokens": 1}}
        if stream:
            async with open_stream(served, COMPLETIONS, body) as response:
                await anext(response.aiter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                async with httpx.AsyncClient(base_url=served.url, timeout=0.2) as http:
                    await http.post(COMPLETIONS, json=body)
        await eventually(lambda: fleet.target.num_open == 0)
        calls = fleet.target.num_calls
        await asyncio.sleep(0.1)
        assert fleet.target.num_calls == calls


async def test_a_full_queue_is_a_429_with_retry_after_streaming_or_not() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    async with gateway(fleet, max_concurrent_requests=1, max_queued_requests=1, max_n=1) as served:
        running = asyncio.create_task(served.post(COMPLETIONS, {"prompt": "a"}))
        await eventually(lambda: served.admission.running == 1)
        queued = asyncio.create_task(served.post(COMPLETIONS, {"prompt": "b"}))
        await eventually(lambda: served.admission.waiting == 1)
        assert await served.metric("tandem_requests_running") == 1
        assert await served.metric("tandem_requests_waiting") == 1
        for stream in (False, True):
            refused = await served.post(COMPLETIONS, {"prompt": "c", "stream": stream})
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
        fleet.target.gate.set()
        assert (await running).status_code == (await queued).status_code == 200
    assert [start.token_ids[-1] for start in fleet.target.starts] == [*b"ab"]


async def test_j4_j5_queued_clients_that_leave_are_never_started_and_harm_nobody() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    async with listening_gateway(fleet, max_concurrent_requests=1, max_n=1) as served:
        running = asyncio.create_task(served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 5}))
        await eventually(lambda: served.admission.running == 1)
        async with httpx.AsyncClient(base_url=served.url) as http:
            queued = [
                asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "q", "stream": stream}))
                for stream in (False, True)
            ]
            await eventually(lambda: served.admission.waiting == 2)
            for task in queued:
                task.cancel()
            await asyncio.gather(*queued, return_exceptions=True)
        await eventually(lambda: served.admission.waiting == 0)
        fleet.target.gate.set()
        assert (await running).json()["choices"][0]["text"] == "bcdef"
        await asyncio.sleep(0.05)
    assert len(fleet.target.starts) == 1


SMALL = AnswerSize(prompt=0, num_prompt_tokens=1, num_answer_tokens=1)


async def waits(admission: Admission, count: int) -> asyncio.Task[Grant]:
    """A task that asks for `count` places, as far as it comes by itself."""
    task = asyncio.create_task(admission.acquire([SMALL] * count))
    await asyncio.sleep(0)
    return task


async def test_j4_leaving_the_queue_takes_no_place_from_anyone() -> None:
    admission = Admission(max_running=1, max_queued=9)
    held = await admission.acquire([SMALL] * 1)
    first, second = await waits(admission, 1), await waits(admission, 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (admission.running, admission.waiting, second.done()) == (1, 1, False)
    admission.release(held)
    await second
    assert (admission.running, admission.waiting) == (1, 0)


async def test_who_leaves_the_queue_lets_a_smaller_request_behind_it_in() -> None:
    admission = Admission(max_running=2, max_queued=9)
    await admission.acquire([SMALL] * 1)
    large, small = await waits(admission, 2), await waits(admission, 1)
    assert not small.done()
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    await asyncio.wait_for(small, 1)
    assert (admission.running, admission.waiting) == (2, 0)


async def test_a_place_granted_to_who_leaves_in_that_moment_is_given_back() -> None:
    admission = Admission(max_running=1, max_queued=9)
    held = await admission.acquire([SMALL] * 1)
    leaving, next_one = await waits(admission, 1), await waits(admission, 1)
    admission.release(held)  # grants it to `leaving`, which has not run since
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await asyncio.wait_for(next_one, 1)
    assert (admission.running, admission.waiting) == (1, 0)


def target_with(num_blocks: int) -> Replica:
    return Replica(address="10.0.0.1:50051", kv_cache=KvCache(num_blocks=num_blocks, block_size=16))


async def test_a_request_whose_blocks_are_not_free_waits_and_the_next_one_gets_a_429() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    fleet.targets = [target_with(4)]
    async with gateway(fleet, max_queued_requests=1) as served:
        running = asyncio.create_task(served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 40}))
        await eventually(lambda: served.admission.running == 1)
        assert await served.metric("tandem_kv_promised_tokens") == 48
        queued = asyncio.create_task(served.post(COMPLETIONS, {"prompt": "b", "max_tokens": 40}))
        await eventually(lambda: served.admission.waiting == 1)
        refused = await served.post(COMPLETIONS, {"prompt": "c", "max_tokens": 1})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert fleet.target.num_open == 1
        fleet.target.gate.set()
        assert (await running).status_code == (await queued).status_code == 200
        assert await served.metric("tandem_kv_promised_tokens") == 0
    assert fleet.placed == ["10.0.0.1:50051"] * 2


async def test_a_request_that_no_target_could_ever_hold_is_refused_with_what_to_change() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.targets = [target_with(32)]
    async with gateway(fleet) as served:
        refused = await served.post(COMPLETIONS, {"prompt": "a", "n": 2, "max_tokens": 400})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, "n", "context_length_exceeded")
        assert "512" in error["message"]
        assert (await served.post(COMPLETIONS, {"prompt": "a", "n": 2, "max_tokens": 200})).status_code == 200


async def test_a_chat_without_max_tokens_is_promised_an_answer_of_usual_length_not_the_whole_context() -> None:
    fleet = FakeFleet.following(says("hello"))
    fleet.target.gate = asyncio.Event()
    fleet.targets = [target_with(32)]  # the context, 512 tokens, in all
    async with gateway(fleet, assumed_answer_tokens=100) as served:
        asking = [asyncio.create_task(served.post(CHAT, {"messages": HELLO})) for _ in range(3)]
        await eventually(lambda: served.admission.running == 3)
        fleet.target.gate.set()
        assert {(await one).status_code for one in asking} == {200}


async def job_of(fleet: FakeFleet, **fields: Any) -> tuple[Generation, Job]:
    chosen = Settings()
    generation = Generation(
        settings=chosen,
        backends=fleet,
        metrics=GatewayMetrics(max_num_draft_tokens=16),
        admission=Admission(max_running=8, max_queued=0),
    )
    body = CompletionBody.model_validate(fields)
    maker = JobMaker(settings=chosen, backends=fleet)
    return generation, await maker.completion(body, request_id="r", arrived=0.0)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_sessions_are_closed_before_the_end_of_an_answer_is_told(prompt: object) -> None:
    fleet = FakeFleet.following(alphabet)
    generation, job = await job_of(fleet, prompt=prompt, max_tokens=9)
    unfinished = len(job.choices)
    async with contextlib.aclosing(generation.run(job)) as deltas:
        async for _, delta in deltas:
            unfinished -= delta.finish_reason is not None
            assert fleet.target.num_open <= unfinished
            assert fleet.drafts.num_open <= unfinished


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_j14_sessions_are_closed_when_closing_a_run_returns_not_some_time_later(prompt: object) -> None:
    fleet = FakeFleet.following(alphabet)
    generation, job = await job_of(fleet, prompt=prompt, max_tokens=90)
    deltas = generation.run(job)
    await anext(deltas)
    assert fleet.target.num_open == len(job.choices)
    await deltas.aclose()
    assert (fleet.target.num_open, fleet.drafts.num_open) == (0, 0)


async def test_the_queue_is_first_come_first_served() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    async with gateway(fleet, max_concurrent_requests=2, max_n=2) as served:
        tasks = []
        for number, prompt in enumerate((["a"], ["b", "c"], ["d"])):  # b and c need both places, d waits behind them
            tasks.append(asyncio.create_task(served.post(COMPLETIONS, {"prompt": prompt})))
            await eventually(lambda: served.admission.running + served.admission.waiting > number)  # noqa: B023
        assert len(fleet.target.starts) == 1
        fleet.target.gate.set()
        await asyncio.gather(*tasks)
    assert [start.token_ids[-1] for start in fleet.target.starts] == [*b"abcd"]


async def test_a_request_that_takes_too_long_is_a_504_and_in_a_stream_an_error() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    async with listening_gateway(fleet, request_timeout_seconds=0.3) as served:
        assert (await served.post(COMPLETIONS, {"prompt": "a"})).status_code == 504
        async with open_stream(served, COMPLETIONS, {"prompt": "a"}) as response:
            assert response.status_code == 200
            body = await response.aread()
        assert b'"code":"timeout"' in body
        assert b"[DONE]" not in body


async def test_b18_a_slow_prefill_gets_headers_at_once_and_then_pings() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    async with listening_gateway(fleet, ping_interval_seconds=0.1) as served:
        async with open_stream(served, COMPLETIONS, {"prompt": "a"}) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            assert await anext(lines) == ": ping"
            fleet.target.gate.set()
            rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""]


async def test_a8_j7_concurrent_streams_do_not_mix() -> None:
    async with listening_gateway(FakeFleet.following(alphabet, wrong_at=lambda position: position % 4 == 1)) as served:
        prompts = [chr(ord("a") + index) for index in range(16)]
        body = {"max_tokens": 40}
        streams = await asyncio.gather(*(served.events(COMPLETIONS, {"prompt": p, **body}) for p in prompts))
        alone = [(await served.post(COMPLETIONS, {"prompt": p, **body})).json()["choices"][0]["text"] for p in prompts]
    assert [text_of(events) for events in streams] == alone


# --- models, health, metrics


async def test_the_model_answers_to_its_own_name_and_to_tandem() -> None:
    async with official_client(alphabet) as (client, served):
        listed = (await client.models.list()).data
        assert [model.id for model in listed] == [MODEL_ID, "tandem"]
        for name in (MODEL_ID, "tandem"):
            assert (await client.models.retrieve(name)).id == name
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nope")
        # I5: an absent model is the served one.
        assert (await served.post(COMPLETIONS, {"prompt": "a"})).json()["model"] == MODEL_ID


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (Readiness("ready"), 200),
        (Readiness("degraded", ("draft x: down",)), 200),
        (Readiness("unavailable", ("target x: down",)), 503),
    ],
)
async def test_j11_liveness_and_readiness_are_different_answers(state: Readiness, status: int) -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.state = state
    async with gateway(fleet) as served:
        response = await served.http.get("/health/ready")
        assert response.status_code == status
        assert response.json() == {"status": state.status, "reasons": list(state.reasons)}
        assert (await served.http.get("/health/live")).status_code == 200
        assert await served.metric("tandem_backend_up", backend="target") == (status == 200)


async def test_b14_while_draining_answers_go_on_and_new_requests_are_503() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    async with listening_gateway(fleet) as served:
        running = asyncio.create_task(served.events(COMPLETIONS, {"prompt": "a", "max_tokens": 5}))
        await eventually(lambda: served.admission.running == 1)
        served.admission.drain()
        assert (await served.http.get("/health/ready")).status_code == 503
        refused = await served.post(COMPLETIONS, {"prompt": "b"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert not await served.admission.idle(within_seconds=0.01)
        fleet.target.gate.set()
        assert text_of(await running) == "bcdef"
        assert await served.admission.idle(within_seconds=1)


async def test_b14_after_sigterm_a_stream_ends_well_and_readiness_says_no() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    app, _, admission = build(fleet)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = build_server(Settings(), app, admission)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await eventually(lambda: server.started)
        async with httpx.AsyncClient(base_url=url) as http:
            answer = asyncio.create_task(
                http.post(COMPLETIONS, json={"prompt": "a", "stream": True, "max_tokens": 3}, timeout=10)
            )
            await eventually(lambda: admission.running == 1)
            server.should_exit = True  # what uvicorn does on SIGTERM
            await eventually(lambda: admission.draining)
            assert (await http.get("/health/ready")).status_code == 503
            assert (await http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 503
            fleet.target.gate.set()
            assert (await answer).text.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(running, 5)
    assert fleet.calls == ["start", "close"]


async def test_b14_when_the_grace_is_over_a_stream_is_cut_not_ended() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()  # never set
    app, _, admission = build(fleet)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = build_server(Settings(shutdown_grace_seconds=0.1), app, admission)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await eventually(lambda: server.started)
        async with httpx.AsyncClient(base_url=url, timeout=10) as http:
            async with http.stream("POST", COMPLETIONS, json={"prompt": "a", "stream": True}) as response:
                server.should_exit = True
                with pytest.raises(httpx.RemoteProtocolError):
                    await response.aread()
        await asyncio.wait_for(running, 5)
    assert (fleet.target.num_open, fleet.drafts.num_open) == (0, 0)


async def test_k6_unknown_paths_make_one_series() -> None:
    async with gateway(alphabet) as served:
        before = (await served.http.get("/metrics")).text.count("\n")
        for number in range(20):
            await served.http.get(f"/nope/{number}")
            await served.post(COMPLETIONS, {"model": f"nope-{number}", "prompt": "a"})
            await served.http.get(f"/v1/models/nope-{number}")
        assert (await served.http.get("/metrics")).text.count("\n") == before
        assert await served.metric("tandem_http_requests_total", route="other", status="4xx") == 20
        assert await served.metric("tandem_http_requests_total", route="/v1/models/{model_id}", status="4xx") == 20


async def test_k8_token_counters_equal_the_sums_of_usage() -> None:
    async with gateway(alphabet) as served:
        bodies = [{"prompt": "a" * (index + 1), "max_tokens": index + 1} for index in range(8)]
        answers = await asyncio.gather(*(served.post(COMPLETIONS, body) for body in bodies))
        usages = [answer.json()["usage"] for answer in answers]
        for counter, field in (("prompt", "prompt_tokens"), ("generation", "completion_tokens")):
            assert await served.metric(f"tandem_{counter}_tokens_total") == sum(usage[field] for usage in usages)
        assert await served.metric("tandem_time_to_first_token_seconds_count") == 8


async def test_metrics_come_in_the_format_that_is_asked_for() -> None:
    async with gateway(alphabet) as served:
        text = await served.http.get("/metrics")
        openmetrics = await served.http.get(
            "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
        )
    assert text.headers["content-type"].startswith("text/plain")
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")


async def test_the_fleet_starts_and_closes_with_the_application() -> None:
    async with listening_gateway(alphabet) as served:
        assert served.fleet.calls == ["start"]
    assert served.fleet.calls == ["start", "close"]


def test_settings_refuse_what_cannot_work() -> None:
    for bad in (
        {"port": -1},
        {"request_timeout_seconds": 0},
        {"target_addresses": ""},
        {"target_addresses": "nohost"},
        {"num_draft_tokens": 20},
        {"max_n": 50},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Settings(**bad)
    assert Settings(draft_addresses="a:1, b:2").draft_addresses == ("a:1", "b:2")
    assert Settings(draft_addresses="").draft_addresses == ()
