"""Whether a command that a page names would work: by the program's own parser, without running it, where it can be."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from typer.exceptions import TyperException

from tandem.bench.arms import chosen_arms
from tandem.errors import TandemError
from tests.documents import ROOT, Command
from tests.setting_names import check_value, command_line, known_names

_OURS: Final = ("tandem.", "benchmarks.", "gateway", "target_service", "draft_service")
_COMPOSE: Final = {"up": {"-d", "--build", "--wait"}, "down": {"-v"}, "build": set(), "logs": {"-f"}, "ps": set()}


class Wrong(Exception):
    """What is wrong with a command."""


def problem(command: Command, folder: Path) -> str | None:
    """What is wrong with it, with its file and line. `folder` takes placeholders for files that it names."""
    check = CHECKS.get("script" if command.program.endswith(".sh") else command.program)
    try:
        if check is None:
            raise Wrong(f"no test knows how to check {command.program!r}; teach tests/document_checks.py")
        _check_settings(command)
        check(command, folder)
    except (Wrong, TyperException, TandemError, ValueError) as error:
        return f"{command.place}: {' '.join(command.words)}: {error}"
    return None


def _check_settings(command: Command) -> None:
    for name, value in command.settings.items():
        if name.startswith("TANDEM_"):
            _need(name in known_names(), f"{name} is no setting")
            check_value(name, value)


def _tandem(command: Command, folder: Path) -> None:
    """Its own parser takes it, in a folder that holds the files it names."""
    parser: Any = command_line()
    name, words = "tandem", list(command.words[1:])
    while words and words[0] in getattr(parser, "commands", {}):
        name = words.pop(0)
        parser = parser.commands[name]
    if hasattr(parser, "commands"):
        _need(not words, f"there is no {name} {' '.join(words)}")
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for variable, value in command.settings.items():
            patch.setenv(variable, value)
        parsed = parser.make_context(name, [_placed(word, folder) for word in words])
    if name == "bench":
        chosen_arms(parsed.params["arm"] or ())


def _placed(word: str, folder: Path) -> str:
    """A file's name as one of a file that is there. One in a folder must be a file of ours."""
    if not re.fullmatch(r"[\w./-]+\.jsonl?", word):
        return word
    if "/" in word and not word.startswith("/"):
        _need((ROOT / word).is_file(), f"there is no file {word}")
        return str(ROOT / word)
    placeholder = folder / Path(word).name
    placeholder.touch()
    return str(placeholder)


def _make(command: Command, _folder: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in command.words[1:]:
        name, is_variable, _ = word.partition("=")
        if is_variable:
            _need(f"$({name})" in makefile or name.startswith("PIP_"), f"the Makefile reads no {name}")
        else:
            _need(re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE), f"the Makefile has no target {word}")


def _docker(command: Command, _folder: Path) -> None:
    words = list(command.words[1:])
    _need(words and words.pop(0) == "compose", "only docker compose is known")
    files, profiles = [], set()
    while words and words[0] in ("-f", "--profile"):
        option, value = words.pop(0), words.pop(0)
        files += [value] if option == "-f" else []
        profiles |= {value} if option == "--profile" else set()
    services: dict[str, Any] = {}
    for file in files or ["docker-compose.yml"]:
        _need((ROOT / file).is_file(), f"there is no {file}")
        for name, service in yaml.safe_load((ROOT / file).read_text())["services"].items():
            services[name] = {**services.get(name, {}), **service}
    missing = profiles - {profile for service in services.values() for profile in service.get("profiles", ())}
    _need(not missing, f"no service has the profile {missing}")
    _need(words and words[0] in _COMPOSE, f"unknown to this test: docker compose {' '.join(words)}")
    if words[0] == "up" and "--scale" in words:
        at = words.index("--scale")
        name, _, count = words[at + 1].partition("=")
        _need(name in services and count.isdecimal(), f"--scale takes a service and a number, not {words[at + 1]}")
        del words[at : at + 2]
    for word in words[1:]:
        _need(word in services or word in _COMPOSE[words[0]], f"neither service nor option: {word}")


def _python(command: Command, _folder: Path) -> None:
    """A module of ours, whose source names every option."""
    _need(command.words[1:2] == ("-m",) and len(command.words) > 2, "only python -m MODULE is known")
    module = command.words[2]
    _need(module.startswith(_OURS), f"{module} is none of our modules")
    source = _source(module)
    for word in command.words[3:]:
        if word.startswith("--"):
            _need(f'"{word.partition("=")[0]}"' in source, f"{module} has no option {word}")


def _source(module: str) -> str:
    found = importlib.util.find_spec(module)
    if found is not None and found.submodule_search_locations is not None:
        found = importlib.util.find_spec(f"{module}.__main__")
    if found is None or found.origin is None:
        raise Wrong(f"there is no module {module} to run")
    return Path(found.origin).read_text()


def _pytest(command: Command, _folder: Path) -> None:
    """The files exist, and the marks are declared."""
    marks = {mark.partition(":")[0] for mark in _pyproject()["tool"]["pytest"]["markers"]}
    words = list(command.words[1:])
    while words:
        word = words.pop(0)
        if word in ("-m", "-k"):
            value = words.pop(0)
            _need(word == "-k" or set(value.split()) - {"not", "and", "or"} <= marks, f"unknown mark: {value}")
        else:
            _need((ROOT / word).exists(), f"there is no {word}")


def _pip(command: Command, _folder: Path) -> None:
    """`pip install` of this project, with extras that it has."""
    project = _pyproject()["project"]
    _need(command.words[1:2] == ("install",), "only pip install is known")
    for word in command.words[2:]:
        named = re.fullmatch(r"([\w.-]+)(?:\[([\w,-]+)\])?", word)
        _need(named and named[1] == project["name"], f"{word} is not this project")
        extras = set((named[2] or "").split(",")) - {""} if named else set()
        _need(extras <= set(project["optional-dependencies"]), f"unknown extras in {word}")


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _openssl(command: Command, folder: Path) -> None:
    """It makes random words only, so it is run."""
    _need(command.words[1:2] == ("rand",), "only openssl rand is known")
    if shutil.which("openssl"):
        ran = subprocess.run(command.words, cwd=folder, capture_output=True, timeout=20, check=False)
        _need(ran.returncode == 0 and ran.stdout, f"exit code {ran.returncode}")


def _script(command: Command, _folder: Path) -> None:
    script = ROOT / command.words[0]
    _need(script.is_file() and os.access(script, os.X_OK), "no script of ours, or not executable")


def _settings_alone(_command: Command, _folder: Path) -> None:
    """NAME=value and nothing else: looked at for all commands alike."""


def _curl(command: Command, _folder: Path) -> None:
    """tests/integration/test_docs.py runs it, against the services."""
    _need(any(re.match(r"(http://)?localhost:8000/", word) for word in command.words), "not of localhost:8000")


def _need(condition: object, otherwise: str) -> None:
    if not condition:
        raise Wrong(otherwise)


CHECKS: Final[Mapping[str, Callable[[Command, Path], None]]] = {
    "tandem": _tandem,
    "make": _make,
    "docker": _docker,
    "python": _python,
    "pytest": _pytest,
    "pip": _pip,
    "openssl": _openssl,
    "curl": _curl,
    "script": _script,
    "": _settings_alone,
}
