"""Every variable that somebody may set, read where it is defined."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import typer.main
from pydantic_settings import BaseSettings

from draft_service.settings import DraftSettings
from gateway.settings import Settings
from tandem.cli.app import build_app
from tandem.settings import LogSettings, TracingSettings
from target_service.settings import TargetSettings
from tests.documents import ROOT

CLASSES: Final[tuple[type[BaseSettings], ...]] = (
    Settings,
    TargetSettings,
    DraftSettings,
    LogSettings,
    TracingSettings,
)

# Read by the command line and by tests where no settings class is.
_OTHERS: Final = {"TANDEM_CACHE", "TANDEM_CHROMIUM", "TANDEM_COMPOSE"}


@cache
def command_line() -> Any:
    """`tandem`, as its parser is."""
    return typer.main.get_command(build_app())


def commands_of(group: Any) -> list[Any]:
    """All commands below `group`."""
    inner = getattr(group, "commands", {}).values()
    return [group, *(command for one in inner for command in commands_of(one))]


@cache
def settings_fields() -> Mapping[str, tuple[type[BaseSettings], str]]:
    """The services' variables: the class and the field that each one sets."""
    return {
        f"{settings.model_config['env_prefix']}{field.upper()}": (settings, field)
        for settings in CLASSES
        for field in settings.model_fields
    }


@cache
def known_names() -> frozenset[str]:
    """The services' variables, the compose files', the command line's."""
    compose = " ".join(file.read_text() for file in ROOT.glob("docker-compose*.yml"))
    given = {
        parameter.envvar
        for command in commands_of(command_line())
        for parameter in command.params
        if isinstance(parameter.envvar, str)
    }
    return frozenset({*settings_fields(), *re.findall(r"\$\{(TANDEM_\w+)", compose), *given, *_OTHERS})


def check_value(name: str, value: str) -> None:
    """Raises ValueError where a service would refuse the value. What no service reads is not looked at."""
    if name in settings_fields():
        settings, field = settings_fields()[name]
        given: dict[str, Any] = {field: value}
        settings(**given)


def default(name: str) -> Any:
    """What a service takes where the variable is not set."""
    settings, field = settings_fields()[name]
    return settings.model_fields[field].default
