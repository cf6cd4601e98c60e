"""Every command in the pages works, every link leads somewhere, every name is one. A new page needs nothing here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.fields import REFUSED, Speculation, StreamOptions
from gateway.openapi import SpeculationReport
from gateway.schemas import ChatBody, CompletionBody
from tests import documents
from tests.document_checks import CHECKS, problem
from tests.documents import ROOT, Command
from tests.monitoring import exported, rules
from tests.setting_names import check_value, command_line, commands_of, default, known_names, settings_fields
from tests.stack import Stack

PAGES = {file: documents.read(file) for file in documents.pages()}
COMMANDS = [command for file, text in PAGES.items() for command in documents.commands(text, file=file)]
CURLS = [command for command in COMMANDS if command.program == "curl"]
SNIPPETS = [b for file, text in PAGES.items() for b in documents.blocks(text, file=file) if b.language == "python"]
CONFIGURATION = {str(file.relative_to(ROOT)): file.read_text() for file in ROOT.glob("*.yml")} | {
    ".env.example": documents.read(".env.example")
}
FOLDERS = {file.name for file in ROOT.iterdir() if file.is_dir() and not file.name.startswith(".")}


def test_every_command_would_work(tmp_path: Path) -> None:
    wrong = [found for command in COMMANDS if (found := problem(command, tmp_path)) is not None]
    assert not wrong, "\n".join(wrong)
    assert {command.program for command in COMMANDS} >= {"tandem", "make", "docker", "curl", "python"}  # it finds them


def test_no_command_hides_in_a_block_of_another_language() -> None:
    hidden = [place for file, text in PAGES.items() for place in documents.hidden_commands(text, file=file)]
    assert not hidden, f"leave the block's language out, or call it sh: {hidden}"


@pytest.mark.parametrize("command", CURLS, ids=lambda command: str(command.place))
def test_every_curl_is_answered(stack: Stack, command: Command) -> None:
    words = [word.replace("localhost:8000", f"127.0.0.1:{stack.gateway_port}") for word in command.words[1:]]
    ran = subprocess.run(
        ["curl", "--silent", "--show-error", "--fail", "--max-time", "60", *words],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout


@pytest.mark.parametrize("block", SNIPPETS, ids=lambda block: str(block.place))
def test_every_python_snippet_runs(stack: Stack, block: documents.Block) -> None:
    """Those that ask the gateway do so. Others are parts of something, and must compile."""
    text = block.text.replace("localhost:8000", f"127.0.0.1:{stack.gateway_port}")
    compile(text, str(block.place), "exec")
    if text != block.text:
        ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=90, check=False)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout


def test_every_variable_is_a_setting() -> None:
    """In full, TANDEM_DRAFT_TABLE; its beginning, `TANDEM_TARGET_...`; or its end, `..._STALL_TIMEOUT_SECONDS`."""
    known, wrong = known_names(), []
    for file, text in (PAGES | CONFIGURATION).items():
        wrong += [
            f"{file}: {name}"
            for name in re.findall(r"\bTANDEM_[A-Z0-9_]+", text)
            if name not in known and not (name.endswith("_") and any(one.startswith(name) for one in known))
        ]
        wrong += [
            f"{file}: {name}"
            for name in re.findall(r"(?<![A-Za-z0-9])_[A-Z]+_[A-Z0-9_]+", text)
            if not any(one.endswith(name) for one in known)
        ]
    assert not wrong, wrong


def test_every_value_that_a_page_gives_a_setting_is_accepted() -> None:
    for file, text in PAGES.items():
        for line, span in documents.spans(text, file=file):
            for name, value in re.findall(r"\b(TANDEM_[A-Z_]+)=([^\s`]+)", span):
                try:
                    check_value(name, value)
                except ValueError as error:
                    pytest.fail(f"{file}:{line}: {name}={value}: {error}")


def test_every_option_is_one_of_some_command() -> None:
    commands = commands_of(command_line())
    options = {option for command in commands for parameter in command.params for option in parameter.opts}
    sources = [*ROOT.glob("benchmarks/**/*.py"), ROOT / "tandem/rpc/healthcheck.py"]
    options |= {option for file in sources for option in re.findall(r'"(--[a-z-]+)"', file.read_text())}
    wrong = [
        f"{file}:{line}: {option}"
        for file, text in PAGES.items()
        for line, span in documents.spans(text, file=file)
        if span.startswith("--")
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", span)
        if option not in options
    ]
    assert not wrong, wrong


def test_every_link_leads_somewhere() -> None:
    wrong = []
    for file, text in PAGES.items():
        for place, target in documents.links(text, file=file):
            path, _, anchor = target.partition("#")
            found = (ROOT / file).parent / path if path else ROOT / file
            if not found.exists():
                wrong.append(f"{place}: {target}")
            elif anchor and anchor not in documents.anchors(found.read_text(), file=path or file):
                wrong.append(f"{place}: {target}: no such heading")
    assert not wrong, wrong


def test_every_file_that_is_named_exists() -> None:
    """`tandem/engine/worker.py` is there; `worker.py` is the name of some file of ours."""
    names = {file.name for folder in FOLDERS for file in (ROOT / folder).rglob("*.*")}
    wrong = []
    for file, text in PAGES.items():
        for line, span in documents.spans(text, file=file):
            path = span.rstrip("/")
            if not re.fullmatch(r"[\w./*-]+", path):
                continue
            if "/" in path and path.partition("/")[0] in FOLDERS:
                known = any(ROOT.glob(path))
            else:
                known = "/" in path or not re.fullmatch(r"[\w-]+\.(py|js|proto|sh)", path) or path in names
            if not known:
                wrong.append(f"{file}:{line}: {span}")
    assert not wrong, wrong


def _limits() -> dict[str, str]:
    """From the table under "Limits": what each variable's default is said to be."""
    section = PAGES["docs/operating.md"].partition("\n## Limits\n")[2].partition("\n## ")[0]
    rows = [row for row in documents.table_rows(section) if row[0].startswith("`")]
    return {name.strip("`"): row[1] for row in rows for name in row[0].split(", ")}


def test_the_table_of_limits_has_the_defaults_that_the_services_have() -> None:
    said = _limits()
    real = {_short(name): _written(default(name)) for name in settings_fields() if _short(name) in said}
    assert said
    assert said == real


def test_the_table_of_limits_leaves_out_no_bound() -> None:
    bound = re.compile(r"_MAX_|_TIMEOUT_SECONDS$|_GRACE_SECONDS$|_RETRY_SECONDS$|_KV_CACHE_BYTES$")
    assert {_short(name) for name in settings_fields() if bound.search(name)} <= set(_limits())


def _short(name: str) -> str:
    """A variable that both model services have is written once, with dots for TARGET and DRAFT."""
    both = {re.sub("^TANDEM_(TARGET|DRAFT)_", f"TANDEM_{role}_", name) for role in ("TARGET", "DRAFT")}
    return re.sub("^TANDEM_(TARGET|DRAFT)_", "..._", name) if both <= set(settings_fields()) else name


def _written(value: object) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def test_the_sizes_of_kv_caches_are_what_the_formula_gives() -> None:
    rows = [row for row in documents.table_rows(PAGES["docs/operating.md"]) if re.fullmatch(r"\d+, \d+, \d+", row[1])]
    assert rows
    for model, shape, of_a_token, tokens in rows:
        layers, heads, size = map(int, shape.split(", "))
        num_bytes = 2 * layers * heads * size * 2
        assert (of_a_token, tokens) == (
            f"{num_bytes:,}",
            f"{default('TANDEM_TARGET_KV_CACHE_BYTES') // num_bytes:,}",
        ), model


def test_the_api_page_has_every_field() -> None:
    text = PAGES["docs/api.md"]
    models = (CompletionBody, ChatBody, Speculation, StreamOptions, SpeculationReport)
    fields = {*REFUSED, *(name for model in models for name in model.model_fields)}
    assert not [name for name in sorted(fields) if f"`{re.sub('^guided_.*', 'guided_*', name)}`" not in text]


def test_alerts_and_metrics_are_those_that_there_are() -> None:
    listed = re.findall(r"\bTandem[A-Z]\w+", PAGES["docs/observability.md"])
    assert sorted(listed) == sorted(rule["alert"] for rule in rules() if "alert" in rule)
    spans = [(file, span) for file, text in PAGES.items() for _, span in documents.spans(text, file=file)]
    wrong = [
        f"{file}: {name}"
        for file, span in spans
        for name in re.findall(r"^(tandem_\w+)", span)
        if name not in exported()
    ]
    assert not wrong, wrong


def test_programs_are_those_that_can_be_checked() -> None:
    assert {*documents.PROGRAMS, "script", ""} == set(CHECKS)
