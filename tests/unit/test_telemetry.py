"""What a log line shows of an exception, in both formats, of our own loggers and of libraries'."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import logging
import structlog
from pydantic import BaseModel
from tandem.telemetry import configure_logging

class Strict(BaseModel):
    number: int

def fail(how):
    secret = "open sesame"
    if how == "key":
        {}[secret]
    if how == "value":
        int(secret)
    if how == "pydantic":
        Strict(number=secret)
    if how == "cause":
        try:
            int(secret)
        except ValueError as error:
            raise RuntimeError("out of memory") from error
    if how == "group":
        raise ExceptionGroup("several", [KeyError(secret), OSError("disk full")])

configure_logging(service="gateway", level="DEBUG", format=FORMAT)
for how in ("key", "value", "pydantic", "cause", "group"):
    try:
        fail(how)
    except Exception:
        structlog.get_logger().exception("failed", how=how)
        logging.getLogger("library").exception("failed")
"""


def log(format: str) -> str:
    program = PROGRAM.replace("FORMAT", repr(format))
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    ).stderr


@pytest.mark.parametrize("format", ["json", "text"])
def test_an_exceptions_place_and_type_are_told_and_never_what_it_quotes(format: str) -> None:
    shown = log(format)
    # The line of the program that names the secret is no line of a traceback: it is not where anything fails.
    assert "sesame" not in shown
    for kind in ("KeyError", "ValueError", "ValidationError", "RuntimeError: out of memory", "OSError: disk full"):
        assert shown.count(kind) >= 2, kind
    assert shown.count("in fail") >= 10


def test_a_json_line_holds_the_whole_traceback() -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in log("json").splitlines()]
    assert len(lines) == 10
    assert all(line["exception"].startswith("Traceback") for line in lines)
    cause = next(line["exception"] for line in lines if line.get("how") == "cause")
    assert cause.index("ValueError") < cause.index("then:") < cause.index("RuntimeError")
