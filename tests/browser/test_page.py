"""A whole chat and a whole race in a real browser; what is shown is what the gateway said."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

PROMPT = "Tell me of the fox and the heron."
ORIGINS = {"accepted", "recovered", "bonus", "plain"}
SHOWN_TOKENS = "spans => spans.map(span => [span.textContent, span.className.replace(/^t /, '')])"


def ask(page: Any, text: str = PROMPT, *, max_tokens: str = "60") -> None:
    """Send `text`, and wait until everything is over."""
    page.fill("#max-tokens", max_tokens)
    page.fill("#prompt", text)
    page.click("#send")
    page.wait_for_selector("#send:not([hidden])")


def streams(page: Any) -> list[dict[str, Any]]:
    """The page's questions that were answered, in their order: request, headers, and the text of the stream."""
    recorded: list[dict[str, Any]] = page.evaluate(
        "async () => { for (const stream of window.streams) await stream.done; return window.streams; }"
    )
    return recorded


def chunks_of(stream: dict[str, Any]) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream["text"].split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def told(stream: dict[str, Any]) -> list[dict[str, Any]]:
    """The tokens of a stream, each with its log-probability."""
    tokens: list[dict[str, Any]] = []
    for choice in (choice for chunk in chunks_of(stream) for choice in chunk["choices"]):
        scores = (choice["logprobs"] or {}).get("content", [])
        tokens += [{**token, "logprob": score["logprob"]} for token, score in zip(choice["trace"], scores, strict=True)]
    return tokens


def shown(page: Any, within: str) -> list[list[str]]:
    """The tokens on the page: text and origin."""
    tokens: list[list[str]] = page.locator(f"{within} .tokens .t").evaluate_all(SHOWN_TOKENS)
    return tokens


def test_a_chat_shows_every_token_with_its_own_origin_and_figures(page: Any) -> None:
    ask(page)
    tokens = told(streams(page)[0])
    assert len(tokens) > 20
    assert shown(page, ".answer") == [[token["text"], token["origin"]] for token in tokens]
    assert {token["origin"] for token in tokens} >= {"accepted", "recovered"}
    report = next(chunk["speculation"] for chunk in chunks_of(streams(page)[0]) if "speculation" in chunk)
    assert page.inner_text("#figure-rate") == f"{math.floor(100 * report['acceptance_rate'] + 0.5)} %"
    assert page.inner_text("#figure-length") == f"{report['acceptance_length']:.2f}"
    assert float(page.inner_text("#figure-speed")) > 0
    assert page.locator("#rounds > div").count() == min(40, len({token["round"] for token in tokens}))
    # The next question goes with the history.
    ask(page, "And then?", max_tokens="5")
    messages = streams(page)[1]["request"]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == "".join(token["text"] for token in tokens)


def test_pointing_at_a_token_tells_its_origin_position_probability_and_round(page: Any) -> None:
    ask(page)
    tokens = told(streams(page)[0])
    number = next(
        index for index, token in enumerate(tokens) if token["origin"] == "accepted" and token["text"].strip()
    )
    token = tokens[number]
    page.locator(".answer .tokens .t").nth(number).hover()
    card = page.locator("#card")
    facts = dict(zip(card.locator("dt").all_inner_texts(), card.locator("dd").all_inner_texts(), strict=True))
    mates = [other for other in tokens if other["round"] == token["round"]]
    accepted = sum(other["origin"] == "accepted" for other in mates)
    assert facts["Origin"] == "accepted draft"
    assert facts["Position"] == str(token["position"]) == str(number)
    assert facts["Round"] == f"{token['round']}, {accepted} of {token['drafted']} drafted accepted"
    share = 100 * math.exp(token["logprob"])
    if 0.05 <= share <= 99.95:
        assert float(facts["Probability"].removesuffix(" %")) == pytest.approx(share, abs=0.51)
    assert page.locator(".answer .t.mate").count() == len(mates)
    page.keyboard.press("Escape")
    assert card.is_hidden()


def test_the_table_has_every_token_too(page: Any) -> None:
    ask(page)
    tokens = told(streams(page)[0])
    page.click(".table summary")
    page.wait_for_selector(".table tbody tr")
    rows = page.locator(".table tbody tr")
    assert rows.count() == len(tokens)
    cells = rows.nth(7).locator("td").all_inner_texts()
    assert (cells[0], cells[4]) == (str(tokens[7]["position"]), str(tokens[7]["round"]))
    assert cells[2].split()[0] == tokens[7]["origin"]


def test_what_one_chooses_is_what_is_asked_for(page: Any) -> None:
    page.fill("#temperature", "0.3")
    page.fill("#seed", "7")
    page.select_option("#draft-tokens", "3")
    page.select_option("#drafter", "ngram")
    page.fill("#api-key", "secret")
    ask(page, max_tokens="20")
    stream = streams(page)[0]
    body = stream["request"]
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.3, 7, 20)
    assert body["speculation"] == {"enabled": True, "num_draft_tokens": 3, "drafter": "ngram", "trace": True}
    assert stream["headers"]["authorization"] == "Bearer secret"
    assert max(token["drafted"] for token in told(streams(page)[0])) <= 3
    # The key is in memory only.
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    page.reload()
    assert page.input_value("#api-key") == ""


def test_without_speculation_every_token_is_plain(page: Any) -> None:
    page.uncheck("#enabled")
    ask(page, max_tokens="20")
    assert {origin for _, origin in shown(page, ".answer")} == {"plain"}
    assert page.inner_text("#figure-rate") == "\N{EN DASH}"
    assert page.inner_text("#figure-plain") == page.inner_text("#figure-speed")


def test_the_switch_measures_plain_decoding_on_the_same_answer(page: Any) -> None:
    page.check("#compare")
    ask(page)
    with_drafts, without = map(told, streams(page))
    assert [token["token_id"] for token in with_drafts] == [token["token_id"] for token in without]
    assert {token["origin"] for token in without} == {"plain"}
    assert "the same text" in page.inner_text(".answer")
    assert float(page.inner_text("#figure-plain")) > 0
    assert "on this very answer" in page.inner_text("#speed-up")


@pytest.mark.parametrize("order", ["apart", "together"])
def test_a_race_ends_with_the_same_text_on_both_sides(page: Any, order: str) -> None:
    page.click("#tab-race")
    page.select_option("#race-order", order)
    ask(page)
    verdict = page.inner_text("#race-verdict")
    races = [stream for stream in streams(page) if stream["request"]["max_tokens"] == 60]
    assert len(races) == 2
    assert {stream["request"]["seed"] for stream in races} == {3}
    texts = {}
    for stream in races:
        lane = "on" if stream["request"]["speculation"]["enabled"] else "off"
        tokens = told(stream)
        assert verdict.startswith(f"The same text, token for token: {len(tokens)} tokens.")
        assert shown(page, f"#lane-{lane}") == [[token["text"], token["origin"]] for token in tokens]
        texts[lane] = page.inner_text(f"#lane-{lane} .tokens")
    assert texts["on"] == texts["off"] != ""
    assert {origin for _, origin in shown(page, "#lane-off")} == {"plain"}
    assert "accepted" in {origin for _, origin in shown(page, "#lane-on")}
    assert page.locator("#race-chart path.run").count() == 4
    # It can be seen again, and skipped.
    page.click("#replay")
    assert page.inner_text("#race-verdict") == ""
    page.click("#replay")
    page.wait_for_selector("#race-verdict:not(:empty)")
    assert page.inner_text("#race-verdict") == verdict


@pytest.mark.parametrize("wishes", [{"reduced_motion": "reduce"}])
def test_who_wants_no_motion_gets_the_result_without_a_replay(page: Any) -> None:
    page.click("#tab-race")
    page.evaluate("window.drawn = 0; new MutationObserver(() => window.drawn++).observe(document.getElementById("
                  "'race-chart'), {childList: true})")  # fmt: skip
    ask(page, max_tokens="20")
    assert page.inner_text("#race-verdict") != ""
    assert page.evaluate("window.drawn") < 5
    assert page.evaluate("document.getAnimations().length") == 0


def test_an_error_is_told_in_words_and_its_field_is_marked(page: Any) -> None:
    page.fill("#max-tokens", "2000")
    page.fill("#prompt", "fox " * 100)
    page.keyboard.press("Enter")
    page.wait_for_selector("#error:not([hidden])")
    assert "maximum context length" in page.inner_text("#error") or "context" in page.inner_text("#error")
    assert page.input_value("#prompt").startswith("fox fox"), "the question is given back"
    page.fill("#temperature", "7")
    page.click("#send")
    assert page.inner_text("#error") == "The temperature must be a number, from 0 to 2."
    assert page.get_attribute("#temperature", "aria-invalid") == "true"
    page.fill("#temperature", "1")
    assert page.get_attribute("#temperature", "aria-invalid") is None


def test_a_field_that_the_gateway_refuses_is_marked_too(page: Any) -> None:
    page.evaluate("document.getElementById('drafter').append(new Option('oracle'))")
    page.select_option("#drafter", "oracle")
    page.fill("#prompt", PROMPT)
    page.click("#send")
    page.wait_for_selector("#error:not([hidden])")
    assert page.inner_text("#error").startswith("Speculation.drafter must be one of auto, ")
    assert page.get_attribute("#drafter", "aria-invalid") == "true"


def test_a_gateway_that_is_gone_is_named(page: Any) -> None:
    page.context.set_offline(True)
    page.fill("#prompt", PROMPT)
    page.click("#send")
    page.wait_for_selector("#error:not([hidden])")
    assert page.inner_text("#error") == "The gateway cannot be reached. Is it still running?"
    page.wait_for_selector("#health[data-state=unreachable]")
    page.context.set_offline(False)
    ask(page, max_tokens="5")
    assert page.locator("#error").is_hidden()


def test_the_keyboard_alone_suffices(page: Any) -> None:
    focused = "document.activeElement.id || document.activeElement.className"
    page.fill("#max-tokens", "40")
    page.locator("body").click(position={"x": 1, "y": 1})
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate(focused) == "prompt"
    page.keyboard.type(PROMPT)
    page.keyboard.press("Enter")
    page.wait_for_selector("#send:not([hidden])")
    assert page.evaluate(focused) == "prompt"
    answer = "".join(text for text, _ in shown(page, ".answer"))
    assert answer in page.text_content("#announce"), "the answer is read out once, as a whole"
    # Back to the answer: its table, then its text.
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    assert "tokens" in page.evaluate(focused)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#card").is_visible()
    assert "Position 1. Probability" in page.text_content("#announce")
    page.keyboard.press("End")
    assert f"Position {len(told(streams(page)[0])) - 1}." in page.text_content("#announce")
    page.keyboard.press("Escape")
    assert page.locator("#card").is_hidden()
    # And a race.
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == "tab-race"
    page.focus("#prompt")
    page.keyboard.type(PROMPT)
    page.keyboard.press("Enter")
    page.wait_for_selector("#race-verdict:not(:empty)")
    assert "The same text" in page.text_content("#announce")


def test_an_answer_can_be_stopped_and_what_came_stays(page: Any) -> None:
    page.fill("#max-tokens", "1900")
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer .t >> nth=5")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:not([hidden])")
    assert "stopped" in page.inner_text(".answer .meta >> nth=0")
    assert 5 < len(shown(page, ".answer")) < 1900
    assert page.locator("#error").is_hidden()
    ask(page, "And then?", max_tokens="5")
    assert len(streams(page)[-1]["request"]["messages"]) == 3


def test_what_the_model_says_is_text_and_never_markup(page: Any) -> None:
    """A model that says HTML, which no random model does when asked to: the stream is written here."""
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    token = {"token_id": 1, "text": hostile, "origin": "bonus", "round": 0, "position": 0, "drafted": 0}
    choice = {"index": 0, "delta": {"content": hostile}, "finish_reason": "stop", "trace": [token], "logprobs": None}
    body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    ask(page)
    assert page.inner_text(".answer .tokens") == hostile
    page.click(".table summary")
    page.locator(".answer .t").first.hover()
    assert page.locator("main img, main script, #card img, #card script").count() == 0


def test_a_stream_that_ends_without_its_end_is_no_answer(page: Any) -> None:
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=": ping\n\n", content_type="text/event-stream")
    )
    ask(page)
    assert page.inner_text("#error").startswith("The answer broke off before its end.")


def test_events_are_read_however_their_bytes_are_cut(page: Any) -> None:
    read = """async size => {
        const { readEvents } = await import("/page/api.js");
        const bytes = new TextEncoder().encode(': ping\\n\\ndata: {"a":"漢🙂"}\\r\\n\\r\\ndata: [DONE]\\n\\n');
        const cut = new ReadableStream({
            start(controller) {
                for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
                controller.close();
            },
        });
        const events = [];
        for await (const data of readEvents(cut)) events.push(data);
        return events;
    }"""
    for size in (1, 2, 3, 1000):
        assert page.evaluate(read, size) == ['{"a":"漢🙂"}', "[DONE]"]
