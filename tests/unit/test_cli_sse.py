"""The reader of server-sent events against the HTML standard's rules."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tandem.cli.sse import ServerSentEvent, read_events


def read(*chunks: bytes) -> list[ServerSentEvent]:
    return list(read_events(chunks))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_all_three_line_ends_end_lines(end: bytes) -> None:
    stream = end.join([b"data: a", b"", b"event: e", b"data: b", b"", b""])
    assert read(stream) == [ServerSentEvent("a"), ServerSentEvent("b", "e")]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_stream_cut_anywhere_gives_the_same_events(end: bytes) -> None:
    stream = end.join([b": ping", b"data: \xc3\xa4\xe2\x80\xa8", b"data: b", b"", b"data:c", b"", b""])
    expected = [ServerSentEvent("\u00e4\u2028\nb"), ServerSentEvent("c")]
    assert read(stream) == expected
    assert read(*(stream[i : i + 1] for i in range(len(stream)))) == expected
    for cut in range(len(stream)):
        assert read(stream[:cut], b"", stream[cut:]) == expected


def test_an_event_is_there_as_soon_as_its_blank_line_is() -> None:
    """With CR line ends too: waiting for the LF that may follow would hold each event back until the next."""
    taken: list[bytes] = []

    def chunks() -> Iterator[bytes]:
        for chunk in (b"data: 1\r\r", b"data: 2\n\n"):
            taken.append(chunk)
            yield chunk

    events = read_events(chunks())
    assert next(events).data == "1"
    assert len(taken) == 1
    assert next(events).data == "2"


def test_comments_and_unknown_fields_are_passed_over() -> None:
    assert read(b": ping\n\nid: 7\nretry: 10\nfoo\ndata: x\n\n: end\n\n") == [ServerSentEvent("x")]


def test_only_one_blank_after_the_colon_is_taken_away() -> None:
    assert read(b"data:  x\n\ndata:x\n\ndata\n\n") == [ServerSentEvent(" x"), ServerSentEvent("x"), ServerSentEvent("")]


def test_an_unfinished_event_is_no_event() -> None:
    assert read(b"data: a\n\ndata: b\n") == [ServerSentEvent("a")]


def test_an_event_without_data_is_no_event_and_leaves_no_name_behind() -> None:
    assert read(b"event: e\n\ndata: a\n\n") == [ServerSentEvent("a")]


def test_a_byte_order_mark_at_the_start_is_passed_over() -> None:
    assert read(b"\xef\xbb", b"\xbfdata: a\n\n") == [ServerSentEvent("a")]


def test_line_separators_inside_json_do_not_break_it() -> None:
    """Text line splitting (str.splitlines) also breaks at these, which JSON need not escape."""
    text = "a\u2028b\u2029c\x85d\x0be\x1cf"
    body = json.dumps({"t": text}, ensure_ascii=False).encode()
    (event,) = read(b"data: " + body + b"\n\n")
    assert json.loads(event.data)["t"] == text
