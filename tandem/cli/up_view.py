"""What `tandem up` shows: the services' lines, its own notices, what it waits for, and how to use what is ready."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from tandem.cli.child import describe_status
from tandem.cli.console import printable
from tandem.cli.log_lines import prefixed, render
from tandem.cli.plan import UpOptions
from tandem.cli.readiness import Readiness
from tandem.cli.supervisor import Failure

_DEFAULT_URL = UpOptions().url
_SHOWN_LINES = 20


class UpView:
    """Writes to one console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def line(self, service_name: str, line: str) -> None:
        """A line that a service wrote."""
        self._console.print(render(service_name, line), soft_wrap=True)

    def notice(self, text: str) -> None:
        """Something that the user should know."""
        self._console.print(prefixed("tandem", Text(printable(text))), soft_wrap=True)

    def stopping(self, options: UpOptions, *, urgent: bool) -> None:
        """Stopping begins, or (`urgent`) waits no longer."""
        if urgent:
            self.notice("stopping at once")
        else:
            self.notice(f"stopping: open answers have {options.grace_seconds:g} s to finish; Ctrl-C again ends them")

    @contextlib.contextmanager
    def waiting(self, options: UpOptions) -> Iterator[Callable[[Readiness], None]]:
        """While it lasts, shows what is waited for: moving on a terminal, one line for each change elsewhere."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("starting")
            shown = ""

            def show(readiness: Readiness) -> None:
                nonlocal shown
                text = waiting_text(readiness, options)
                if text != shown and not self._console.is_terminal:
                    self.notice(text)
                shown = text
                progress.update(task, description=text)

            yield show

    def serving(self, readiness: Readiness, options: UpOptions, *, seconds: float, how_to_stop: str) -> None:
        """The summary: where it is, how to try it, how to stop it."""
        self._console.print()
        text = Text.assemble((f"Serving at {options.url}", "bold green"), f", after {seconds:.0f} s.")
        if options.reached_by_others and not options.asks_for_key:
            text.append(" Other machines reach it too, and nothing asks them for a key.", "yellow")
        self._console.print(text, soft_wrap=True)
        if not options.draft:
            self._console.print("Without a draft: plain decoding.")
        elif readiness.status == "degraded":
            why = "; ".join(readiness.reasons) or "the draft is not ready yet"
            self._console.print(Text(f"Plain decoding for now: {printable(why)}.", "yellow"), soft_wrap=True)
        chat = "tandem chat" if options.url == _DEFAULT_URL else f"tandem chat --url {options.url}"
        self._console.print(f"\n  {chat}\n  {curl_example(options)}\n", soft_wrap=True, markup=False)
        self._console.print(how_to_stop, soft_wrap=True, markup=False)
        self._console.print()

    def failure(self, failure: Failure) -> None:
        """Why everything ended, with the last words of the service at fault."""
        name = failure.service_name
        self._console.print()
        self._console.print(
            Text(f"{name} stopped ({describe_status(failure.status)}), and nothing works without it.", "bold red"),
            soft_wrap=True,
        )
        if failure.last_lines:
            self._console.print("Its last lines:", style="bold")
            for line in failure.last_lines:
                self.line(name, line)

    def background_failure(self, log: Path) -> None:
        """Why `--detach` has nothing to show for."""
        for line in log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]:
            self._console.print(Text(printable(line)), soft_wrap=True)
        self._console.print(Text(f"It ended before it served. The whole log: {log}", "bold red"), soft_wrap=True)


def waiting_text(readiness: Readiness, options: UpOptions) -> str:
    """What is missing, in a few words."""
    if readiness.status == "silent":
        return "waiting for the gateway to answer"
    if readiness.status == "unavailable":
        return f"waiting for the target to load {options.model}"
    return "waiting for the draft"


def curl_example(options: UpOptions) -> str:
    """A request that streams an answer, to be pasted into a shell."""
    body = {"model": "tandem", "messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": True}
    text = json.dumps(body, separators=(",", ":"))
    key = ' -H "authorization: Bearer $TANDEM_API_KEY"' if options.asks_for_key else ""
    return f"curl -N {options.url}/v1/chat/completions{key} -H 'content-type: application/json' -d '{text}'"
