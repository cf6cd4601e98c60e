"""The gateway over a real socket, with scripted services behind it: prompts, limits, and what is asked of drafts."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from gateway.tokenizer import Tokenizer
from tandem.errors import InvalidRequest, Unavailable
from tests.fakes import (
    BOS,
    CONTEXT_LENGTH,
    END,
    START,
    VOCAB_SIZE,
    FakeFleet,
    alphabet,
    says,
    served_model,
    text_ids,
    tokenizer_files,
)
from tests.gateways import (
    CHAT,
    COMPLETIONS,
    HELLO,
    gateway,
    text_of,
)

pytestmark = pytest.mark.usefixtures("quiet_logs")


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
