"""Services' log lines as `tandem up` shows them."""

from __future__ import annotations

import json

from tandem.cli.log_lines import parse, render


def line(**fields: object) -> str:
    return json.dumps({"event": "loading", "level": "info", "timestamp": "2026-01-02T03:04:05.6Z", **fields})


def test_an_event_is_shown_with_service_level_and_fields() -> None:
    shown = render("target", line(level="warning", service="target", model="bundled", seconds=2.5, note="two words"))
    assert shown.plain.startswith("target  | ")
    assert shown.plain.endswith(' warning loading model=bundled seconds=2.5 note="two words"')


def test_the_time_is_that_of_this_place() -> None:
    event = parse(line())
    assert event is not None
    assert event.time[-5:] == "04:05"  # hours depend on the zone, and so may minutes by half


def test_what_is_no_event_is_shown_as_it_is() -> None:
    for text in ("Segmentation fault", "{not JSON", "[1]", '{"no": "event"}', ""):
        assert parse(text) is None
        assert render("draft", text).plain == f"draft   | {text}"


def test_a_traceback_stands_below_its_event_behind_the_same_prefix() -> None:
    lines = render("gateway", line(exception="Traceback\n  File\nValueError\n")).plain.split("\n")
    assert lines[1:] == ["gateway | Traceback", "gateway |   File", "gateway | ValueError"]


def test_control_characters_of_a_service_do_not_reach_the_terminal() -> None:
    shown = render("target", line(model="a\x1b[2Jb\x07")).plain + render("target", "x\x1b]0;t\x07\x9b").plain
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown)


def test_levels_and_services_differ_in_style() -> None:
    styles = {str(span.style) for span in render("target", line(level="error")).spans}
    assert "bold red" in styles
    assert "cyan" in styles
