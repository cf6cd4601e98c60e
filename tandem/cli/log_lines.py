"""A service's log line, made readable: `gateway | 12:03:04 warning peer_down  role=draft`.

Services write JSON when `tandem up` runs them. What is not JSON (a traceback, a library's own words) is shown as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from rich.style import Style
from rich.text import Text

from tandem.cli.console import printable

_LEVEL_STYLES: Mapping[str, str] = {"debug": "dim", "warning": "yellow", "error": "bold red", "critical": "bold red"}
_SERVICE_STYLES: Mapping[str, str] = {"target": "cyan", "draft": "magenta", "gateway": "green"}
_PREFIX_WIDTH = max(map(len, _SERVICE_STYLES))
_SHOWN_APART = frozenset({"event", "level", "timestamp", "service", "exception"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent:
    """One event as a service logged it."""

    event: str
    level: str
    time: str  # of the day, here
    fields: Mapping[str, object]
    exception: str


def parse(line: str) -> LogEvent | None:
    """The event in `line`, or None where it is no event."""
    if not line.startswith("{"):
        return None
    try:
        content = json.loads(line)
    except ValueError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("event"), str):
        return None
    return LogEvent(
        event=content["event"],
        level=str(content.get("level", "info")).lower(),
        time=_time_of_day(content.get("timestamp")),
        fields={name: value for name, value in content.items() if name not in _SHOWN_APART},
        exception=str(content.get("exception") or ""),
    )


def render(service_name: str, line: str) -> Text:
    """`line` behind its service's name, one colour per service; levels stand out."""
    event = parse(line)
    if event is None:
        return prefixed(service_name, Text(printable(line)))
    text = Text()
    text.append(f"{event.time} ", "dim")
    text.append(f"{event.level:<7} ", _LEVEL_STYLES.get(event.level, ""))
    text.append(printable(event.event), _LEVEL_STYLES.get(event.level, "bold"))
    for name, value in event.fields.items():
        text.append(f" {printable(name)}=", "dim")
        text.append(printable(_shown(value)))
    if event.exception:
        text.append("\n" + printable(event.exception.rstrip()))
    return prefixed(service_name, text)


def prefixed(name: str, text: Text) -> Text:
    """Every line of `text` behind `name`."""
    style = Style.parse(_SERVICE_STYLES.get(name, "bold"))
    prefix = Text(f"{name:<{_PREFIX_WIDTH}} | ", style)
    return Text("\n").join(prefix + line for line in text.split("\n", allow_blank=True))


def _time_of_day(timestamp: object) -> str:
    try:
        return datetime.fromisoformat(str(timestamp)).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return "--:--:--"


def _shown(value: object) -> str:
    """A bare word as it is, everything else as JSON."""
    if isinstance(value, str) and value and not any(c.isspace() or c in "\"'=" for c in value):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
