"""What every process's `__main__` does around its own wiring: logs, errors a person can act on, an exit code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import uvloop
from pydantic import ValidationError

from tandem.errors import TandemError
from tandem.settings import LogSettings, TracingSettings
from tandem.telemetry import configure_logging

_SHARED_PREFIXES = {
    settings.__name__: settings.model_config.get("env_prefix", "") for settings in (LogSettings, TracingSettings)
}


def launch(service: str, serve: Callable[[], Awaitable[None]]) -> int:
    """Run `serve` to its end; the process's exit code, as of `run_process`."""

    async def run() -> None:
        await serve()

    return run_process(service, lambda: uvloop.run(run()))


def run_process(service: str, run: Callable[[], None]) -> int:
    """Configure logging, then `run`; the exit code. Bad settings and known errors are one log line, no traceback."""
    log = structlog.get_logger()
    try:
        log_settings = LogSettings()
    except ValidationError as error:
        configure_logging(service=service, level="INFO", format="text")
        _tell(log, error, service)
        return 2
    configure_logging(service=service, level=log_settings.level, format=log_settings.format)
    try:
        run()
    except ValidationError as error:
        _tell(log, error, service)
        return 2
    except TandemError as error:
        log.error("cannot_serve", reason=error.message)
        return 1
    return 0


def _tell(log: structlog.typing.FilteringBoundLogger, error: ValidationError, service: str) -> None:
    """A line for each setting that is wrong. What it is set to is not repeated."""
    prefix = _SHARED_PREFIXES.get(error.title, f"TANDEM_{service.upper()}_")
    for problem in error.errors():
        setting = ".".join(map(str, problem["loc"]))  # empty where several do not go together; the problem names them
        variable = {"variable": f"{prefix}{setting.upper()}"} if setting else {}
        log.error("bad_setting", setting=setting, problem=problem["msg"], **variable)
