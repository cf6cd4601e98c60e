"""`tandem chat`: its requests, what it makes of the stream, and what it shows. The gateway is a scripted transport."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from tandem.cli.chat import Chat, Outcome, parse_num_draft_tokens
from tandem.cli.chat_client import ChatClient, ChatSettings, Piece, Report
from tandem.cli.chat_view import AnswerView, Figures, accepted_style
from tandem.errors import InvalidRequest, TandemError, Unavailable

_SPECULATION = {
    "rounds": 4,
    "drafted": 10,
    "accepted": 6,
    "acceptance_rate": 0.6,
    "acceptance_length": 2.5,
    "draftless_rounds": 1,
    "seed": 99,
}


def token(text: str, origin: str) -> dict[str, Any]:
    return {"token_id": 1, "text": text, "origin": origin, "round": 0, "position": 0}


def chunk(content: str | None, *trace: dict[str, Any], finish_reason: str | None = None, **top: Any) -> dict[str, Any]:
    delta = {} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason, "trace": list(trace)}], **top}


def sse(*chunks: dict[str, Any], done: bool = True) -> bytes:
    events = [json.dumps(entry) for entry in chunks] + (["[DONE]"] if done else [])
    return b": ping\n\n" + b"".join(b"data: " + event.encode() + b"\n\n" for event in events)


def an_answer(text: str = "Hello you") -> bytes:
    first, rest = text.split(" ", 1)
    return sse(
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "trace": []}]},
        chunk(first, token(first, "plain")),
        chunk(" " + rest, token(" " + rest, "accepted")),
        chunk(None, token("", "bonus"), finish_reason="stop", speculation=_SPECULATION),
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}},
    )


class Gateway:
    """Answers every request with the next of `bodies`, and remembers the requests."""

    def __init__(self, *bodies: bytes | httpx.Response) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self._bodies = list(bodies)

    def client(self, *, api_key: str | None = None) -> ChatClient:
        return ChatClient("http://127.0.0.1:8000", api_key=api_key, transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(request.content))
        self.headers.append(request.headers)
        body = self._bodies.pop(0)
        return body if isinstance(body, httpx.Response) else httpx.Response(200, content=body)


def terminal(**options: Any) -> Console:
    defaults: dict[str, Any] = {"force_terminal": True, "color_system": "standard", "_environ": {}}
    return Console(file=io.StringIO(), width=80, **(defaults | options))


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def a_chat(
    gateway: Gateway, *, system: str | None = None, settings: ChatSettings | None = None
) -> tuple[Chat, Console, Console]:
    out, aside = terminal(), terminal(color_system=None)
    return Chat(gateway.client(), settings or ChatSettings(), AnswerView(out, aside), system=system), out, aside


def pieces_of(*bodies: bytes | httpx.Response) -> tuple[list[Piece], Report]:
    report = Report()
    with Gateway(*bodies).client() as client:
        return list(client.answer(ChatSettings().body([]), report)), report


# --- the request ---------------------------------------------------------------------------------------------------


def test_a_request_holds_what_was_chosen_and_nothing_else() -> None:
    assert ChatSettings().body([{"role": "user", "content": "x"}]) == {
        "model": "tandem",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"enabled": True, "trace": True},
    }
    settings = ChatSettings(
        temperature=0.0, max_tokens=5, seed=0, speculation=False, num_draft_tokens=3, drafter="ngram"
    )
    body = settings.body([])
    assert body["temperature"] == 0.0
    assert body["seed"] == 0
    assert body["max_tokens"] == 5
    assert body["speculation"] == {"enabled": False, "num_draft_tokens": 3, "drafter": "ngram", "trace": True}


def test_the_key_goes_along_where_there_is_one() -> None:
    gateway = Gateway(an_answer(), an_answer())
    for api_key in (None, "secret"):
        list(gateway.client(api_key=api_key).answer({}, Report()))
    assert "authorization" not in gateway.headers[0]
    assert gateway.headers[1]["authorization"] == "Bearer secret"


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_url_as_for_openai_clients_is_understood(url: str) -> None:
    assert ChatClient(url, api_key=None).url == "http://h:1"


def test_a_url_without_its_scheme_is_refused_with_advice() -> None:
    with pytest.raises(InvalidRequest, match="http://"):
        ChatClient("localhost:8000", api_key=None)


# --- the stream ----------------------------------------------------------------------------------------------------


def test_neighbours_of_one_kind_come_as_one_piece() -> None:
    trace = [token("a", "accepted"), token("", "accepted"), token("bc", "recovered"), token("d", "bonus")]
    pieces, _ = pieces_of(sse(chunk("abcd", *trace)))
    assert pieces == [Piece("a", accepted=True, num_tokens=2), Piece("bcd", accepted=False, num_tokens=2)]


def test_a_server_that_gives_no_trace_is_shown_too() -> None:
    plain = {"choices": [{"index": 0, "delta": {"content": "abc"}, "finish_reason": None}]}
    pieces, report = pieces_of(sse(plain, {"choices": [{"delta": {}, "finish_reason": "length"}]}))
    assert pieces == [Piece("abc", accepted=False, num_tokens=1)]
    assert report.finish_reason == "length"


def test_the_last_chunks_fill_the_report() -> None:
    pieces, report = pieces_of(an_answer())
    assert "".join(piece.text for piece in pieces) == "Hello you"
    assert report == Report("stop", 3, _SPECULATION)


def test_an_error_in_mid_stream_is_told() -> None:
    with pytest.raises(TandemError, match="target went away"):
        pieces_of(sse(chunk("a", token("a", "plain")), {"error": {"message": "target went away"}}, done=False))


def test_a_stream_that_just_ends_is_an_error() -> None:
    with pytest.raises(Unavailable, match="before the answer's end"):
        pieces_of(sse(chunk("a", token("a", "plain")), done=False))


def test_what_is_no_json_is_an_error() -> None:
    with pytest.raises(Unavailable, match="no JSON"):
        pieces_of(b"data: <html>\n\n")


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(400, json={"error": {"message": "temperature must be..."}}), "temperature must be"),
        (httpx.Response(401, json={"error": {"message": "no key"}}), "TANDEM_API_KEY"),
        (httpx.Response(429, headers={"retry-after": "1"}, json={"error": {"message": "full"}}), "try again in 1 s"),
        (httpx.Response(502, text="<html>Bad gateway"), "502: <html>Bad gateway"),
        (httpx.Response(503, json=["odd"]), "odd"),
        (httpx.Response(503), "Service Unavailable"),
    ],
)
def test_a_refusal_is_told_with_what_to_do(response: httpx.Response, message: str) -> None:
    with pytest.raises(TandemError, match=message):
        pieces_of(response)


def test_a_gateway_that_is_not_there_is_told_with_what_to_do() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    client = ChatClient("http://127.0.0.1:8000", api_key=None, transport=httpx.MockTransport(refuse))
    for attempt in (lambda: list(client.answer({}, Report())), client.model_id):
        with pytest.raises(Unavailable, match="tandem up"):
            attempt()


# --- the conversation ----------------------------------------------------------------------------------------------


def test_the_conversation_goes_along_with_every_turn() -> None:
    gateway = Gateway(an_answer("One two"), an_answer("Three four"))
    chat, _, _ = a_chat(gateway, system="Be brief.")
    chat.take("first\n")
    chat.take("second\n")
    assert [message["content"] for message in gateway.requests[1]["messages"]] == [
        "Be brief.",
        "first",
        "One two",
        "second",
    ]
    assert [message["role"] for message in gateway.requests[1]["messages"]] == ["system", "user", "assistant", "user"]


def test_a_failed_turn_did_not_happen() -> None:
    gateway = Gateway(httpx.Response(503, json={"error": {"message": "down"}}), an_answer())
    chat, _, _ = a_chat(gateway)
    with pytest.raises(TandemError):
        chat.take("lost")
    chat.take("again")
    assert gateway.requests[1]["messages"] == [{"role": "user", "content": "again"}]


def test_ctrl_c_stops_the_answer_closes_the_connection_and_keeps_what_was_said() -> None:
    class Endless(httpx.SyncByteStream):
        closed = False

        def __iter__(self) -> Iterator[bytes]:
            yield sse(chunk("So far", token("So far", "accepted")), done=False)
            raise KeyboardInterrupt

        def close(self) -> None:
            Endless.closed = True

    chat, out, aside = a_chat(Gateway(httpx.Response(200, stream=Endless())))
    assert chat.take("tell me") is Outcome.STOPPED
    assert Endless.closed
    assert chat.messages[-1] == {"role": "assistant", "content": "So far"}
    assert "stopped" in written(aside)
    assert written(out).endswith("\n")


def test_commands_change_the_next_request() -> None:
    gateway = Gateway(*[an_answer()] * 4)
    chat, _, _ = a_chat(gateway)
    for line in ("/seed 7", "/k 3", "/off", "question"):
        assert chat.take(line) is Outcome.DONE
    assert gateway.requests[0]["seed"] == 7
    assert gateway.requests[0]["speculation"] == {"enabled": False, "num_draft_tokens": 3, "trace": True}
    for line in ("/seed", "/k auto", "/on", "/reset", "question"):
        chat.take(line)
    assert "seed" not in gateway.requests[1]
    assert gateway.requests[1]["speculation"] == {"enabled": True, "num_draft_tokens": "auto", "trace": True}
    assert len(gateway.requests[1]["messages"]) == 1
    assert chat.take("") is Outcome.DONE
    assert len(gateway.requests) == 2
    assert chat.take("/quit") is Outcome.LEAVE


@pytest.mark.parametrize("line", ["/seed x", "/k 0", "/k -1", "/k x", "/k", "/nonsense"])
def test_a_command_that_cannot_be_followed_says_why_and_changes_nothing(line: str) -> None:
    settings = ChatSettings()
    chat, _, _ = a_chat(Gateway(), settings=settings)
    with pytest.raises(InvalidRequest):
        chat.take(line)
    assert settings == ChatSettings()


def test_the_number_of_draft_tokens_is_auto_or_positive() -> None:
    assert parse_num_draft_tokens("auto") == "auto"
    assert parse_num_draft_tokens("16") == 16
    with pytest.raises(InvalidRequest, match="auto"):
        parse_num_draft_tokens("²")


# --- what is shown -------------------------------------------------------------------------------------------------


def test_accepted_tokens_are_coloured_and_the_targets_own_are_not() -> None:
    chat, out, _ = a_chat(Gateway(an_answer()))
    chat.take("hi")
    assert written(out) == "Hello\x1b[32m you\x1b[0m\n"


def test_without_colours_accepted_tokens_are_underlined() -> None:
    out = terminal(no_color=True)
    AnswerView(out, out).piece(Piece("yes", accepted=True, num_tokens=1))
    assert written(out) == "\x1b[4myes\x1b[0m"
    assert accepted_style(terminal(_environ={"NO_COLOR": "1"})) == "underline"


def test_where_no_terminal_is_the_text_is_all_there_is() -> None:
    out = terminal(force_terminal=False, color_system=None)
    view = AnswerView(out, out)
    view.legend()
    for piece in (Piece("a ", True, 1), Piece("b" * 200 + "  ", False, 1), Piece("\n\tc ", True, 1)):
        view.piece(piece)
    assert written(out) == "a " + "b" * 200 + "  \n\tc "


def test_markup_and_control_characters_of_a_model_do_nothing() -> None:
    out = terminal()
    AnswerView(out, out).piece(Piece("[red]x[/] :smile: \x1b[2J\x1b]0;title\x07\x9b1m", accepted=False, num_tokens=1))
    assert written(out) == "[red]x[/] :smile: [2J]0;title1m"


def test_the_legend_shows_both_kinds() -> None:
    out, aside = terminal(), terminal()
    AnswerView(out, aside).legend()
    assert "\x1b[32mdrafted and accepted\x1b[0m" in written(aside)
    assert "target's own" in written(aside)


def test_the_figures_are_one_line_of_all_that_is_known() -> None:
    figures = Figures(Report("length", 21, _SPECULATION), num_tokens=20, first_seconds=0.5, num_first_tokens=1)
    figures.last_seconds = 2.5
    assert figures.summary() == (
        "21 tokens · 10.0 tokens/s · first token 0.50 s · 60% of 10 drafted accepted · "
        "2.50 tokens per target call · seed 99 · cut off by the length limit"
    )
    assert Figures(Report()).summary() == "0 tokens"
    assert Figures(Report(None, 1, {"drafted": 0, "acceptance_rate": None, "acceptance_length": None})).summary() == (
        "1 token · nothing drafted"
    )


def test_the_rate_counts_what_came_after_the_first_token() -> None:
    """Tokens that came together with the first took no time that was measured."""
    figures = Figures(Report())
    list(figures.timed([Piece("a", False, 3), Piece("b", True, 2)]))
    assert (figures.num_tokens, figures.num_first_tokens) == (5, 3)
    assert figures.first_seconds is not None
    assert figures.first_seconds <= figures.last_seconds
