"""`tandem up`: the services on this machine, from the first check to the last process gone.

1. Ports that are in use are reported before anything starts.
2. The bundled model is fetched, where it is used and not there yet.
3. The services start, and their lines are shown; once the gateway serves, so is how to use it.
4. Ctrl-C, SIGTERM, `tandem down` or the end of the target or gateway stop all of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from tandem.cli.announce import announce
from tandem.cli.console import stderr_console, stdout_console
from tandem.cli.detached import fork_into_background, wait_for_background
from tandem.cli.fetching import fetch_with_bar
from tandem.cli.plan import UpOptions, plan_ports, plan_services
from tandem.cli.ports import port_problems
from tandem.cli.state import UpState, log_path, recorded, running
from tandem.cli.supervisor import Backoff, Failure, StopRequest, Supervisor
from tandem.cli.up_view import UpView
from tandem.errors import TandemError
from tandem.models.bundled import default_cache_dir

_KILL_MARGIN_SECONDS = 10.0  # for what the services do after their own grace period: write out, close, free


def run_up(options: UpOptions, environment: Mapping[str, str], folder: Path, *, detach: bool) -> int:
    """Serve until stopped; the exit code. With `detach`, return once it serves. Raises TandemError before any start."""
    check_ports(options, running(folder))
    if options.bundled_model_used:
        fetch_with_bar(default_cache_dir(), stderr_console())
    if not detach:
        return _serve(options, environment, folder)
    log = log_path(folder, options.port)
    process_id = fork_into_background(log)
    if process_id == 0:
        return _serve(options, environment, folder)
    return asyncio.run(wait_for_background(process_id, options, UpView(stdout_console()), log))


def check_ports(options: UpOptions, others: list[UpState]) -> None:
    """Raise TandemError, naming every port that cannot be had and the option that changes it."""
    problems = port_problems(plan_ports(options))
    if not problems:
        return
    for other in others:
        problems.append(f"`tandem up` is running already, at {other.url}: `tandem down` ends it")
    raise TandemError("\n  ".join(["cannot start:", *problems]) if len(problems) > 1 else problems[0])


def _serve(options: UpOptions, environment: Mapping[str, str], folder: Path) -> int:
    kill_after = options.grace_seconds + _KILL_MARGIN_SECONDS
    state = UpState(
        pid=os.getpid(),
        port=options.port,
        url=options.url,
        stop_seconds=2 * kill_after,  # the gateway's, and then the model services'
    )
    view = UpView(stdout_console())
    with recorded(folder, state):
        failure = asyncio.run(_supervise(options, environment, view, kill_after_seconds=kill_after))
    if failure is not None:
        view.failure(failure)
        return 1
    view.notice("stopped")
    return 0


async def _supervise(
    options: UpOptions, environment: Mapping[str, str], view: UpView, *, kill_after_seconds: float
) -> Failure | None:
    stop = StopRequest()
    supervisor = Supervisor(
        plan_services(options, environment), view, grace_seconds=kill_after_seconds, backoff=Backoff()
    )
    async with asyncio.TaskGroup() as group:
        announcing = group.create_task(announce(options, view))

        def asked() -> None:
            announcing.cancel()
            view.stopping(options, urgent=stop.asked.is_set())
            stop.ask()

        _on_stop_signals(asked)
        failure = await supervisor.run(stop)
        announcing.cancel()
    return failure


def _on_stop_signals(asked: Callable[[], None]) -> None:
    """Ctrl-C, SIGTERM and a closed terminal ask to stop; again, to stop at once."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, asked)
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
            loop.add_signal_handler(number, asked)
