"""What both model services' `__main__` do around their own wiring: logs, errors a person can act on, an exit code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import uvloop
from pydantic import ValidationError

from tandem.errors import TandemError
from tandem.settings import LogSettings
from tandem.telemetry import configure_logging


def launch(service: str, serve: Callable[[], Awaitable[None]]) -> int:
    """Run `serve` to its end; the process's exit code. Bad settings and known errors are one log line, no traceback."""
    log_settings = LogSettings()
    configure_logging(service=service, level=log_settings.level, format=log_settings.format)
    log = structlog.get_logger()

    async def run() -> None:
        await serve()

    try:
        uvloop.run(run())
    except ValidationError as error:
        for problem in error.errors():
            log.error("bad_setting", setting=".".join(map(str, problem["loc"])), problem=problem["msg"])
        return 2
    except TandemError as error:
        log.error("cannot_serve", reason=error.message)
        return 1
    return 0
