"""`tandem chat`: a conversation with a gateway, on a terminal or over a pipe."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Callable, Mapping

from rich.console import Console

from tandem.cli.chat_client import ChatClient, ChatSettings, Report
from tandem.cli.chat_view import AnswerView, Figures
from tandem.cli.console import print_error, stderr_console, stdout_console
from tandem.errors import InvalidRequest, TandemError

_PROMPT = "> "
_INTERRUPTED = 130  # as shells say it for Ctrl-C
_HELP = """\
/reset    forget the conversation
/seed N   the same randomness in every answer from now on; /seed alone: a new one each time
/k N      at most N draft tokens a round; /k auto: the gateway decides
/off /on  without and with speculation
/quit     leave; so does Ctrl-D. Ctrl-C stops a running answer"""


class Outcome(enum.Enum):
    """What became of a line."""

    DONE = "done"
    STOPPED = "stopped"  # Ctrl-C cut the answer short
    LEAVE = "leave"


class Chat:
    """The conversation so far, and what its next request carries."""

    def __init__(self, client: ChatClient, settings: ChatSettings, view: AnswerView, *, system: str | None) -> None:
        self._client = client
        self._settings = settings
        self._view = view
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def take(self, line: str) -> Outcome:
        """One line of the user's: a command, or the next turn. Raises TandemError, and the turn did not happen."""
        line = line.strip()
        if line.startswith("/"):
            return self._command(line)
        return self._turn(line) if line else Outcome.DONE

    def _turn(self, text: str) -> Outcome:
        question = {"role": "user", "content": text}
        report = Report()
        figures = Figures(report)
        said: list[str] = []
        pieces = self._client.answer(self._settings.body([*self.messages, question]), report)
        stopped = False
        with contextlib.closing(pieces):
            try:
                for piece in figures.timed(pieces):
                    said.append(piece.text)
                    self._view.piece(piece)
            except KeyboardInterrupt:
                stopped = True
            finally:
                if said:
                    self._view.end_line()
        if said:  # an answer that was stopped is remembered as far as it went
            self.messages += [question, {"role": "assistant", "content": "".join(said)}]
        if stopped:
            self._view.notice("stopped")
        self._view.figures(figures)
        return Outcome.STOPPED if stopped else Outcome.DONE

    def _command(self, line: str) -> Outcome:
        name, _, argument = line[1:].partition(" ")
        commands: Mapping[str, Callable[[str], str]] = {
            "reset": self._reset,
            "seed": self._seed,
            "k": self._num_draft_tokens,
            "off": lambda _: self._speculate(on=False),
            "on": lambda _: self._speculate(on=True),
            "help": lambda _: _HELP,
        }
        if name in ("quit", "exit"):
            return Outcome.LEAVE
        if name not in commands:
            raise InvalidRequest(f"there is no /{name}. These there are:\n{_HELP}")
        self._view.notice(commands[name](argument.strip()))
        return Outcome.DONE

    def _reset(self, _argument: str) -> str:
        self.messages = list(self._opening)
        return "the conversation begins anew"

    def _seed(self, argument: str) -> str:
        if not argument:
            self._settings.seed = None
            return "a new seed for each answer"
        try:
            self._settings.seed = int(argument)
        except ValueError:
            raise InvalidRequest(f"a seed is a whole number, as in /seed 7, not {argument!r}") from None
        return f"seed {self._settings.seed}"

    def _num_draft_tokens(self, argument: str) -> str:
        self._settings.num_draft_tokens = parse_num_draft_tokens(argument)
        return f"draft tokens a round: {argument}"

    def _speculate(self, *, on: bool) -> str:
        self._settings.speculation = on
        return "speculation is on" if on else "speculation is off: plain decoding"


def parse_num_draft_tokens(text: str) -> int | str:
    """`auto`, or a whole number from 1. Raises InvalidRequest."""
    if text == "auto":
        return text
    if text.isascii() and text.isdecimal() and int(text) >= 1:
        return int(text)
    raise InvalidRequest(f"the number of draft tokens is at least 1, or auto, not {text!r}; /off switches drafting off")


def run_chat(url: str, *, api_key: str | None, settings: ChatSettings, system: str | None) -> int:
    """Chat until the user leaves or the pipe ends; the exit code. Over a pipe the first error ends it."""
    out, aside = stdout_console(), stderr_console()
    view = AnswerView(out, aside)
    with ChatClient(url, api_key=api_key) as client:
        chat = Chat(client, settings, view, system=system)
        if not sys.stdin.isatty():
            return _over_a_pipe(chat)
        view.notice(f"{client.model_id()} at {client.url}. /help lists the commands, Ctrl-D leaves.")
        view.legend()
        _on_a_terminal(chat, view, aside)
    return 0


def _over_a_pipe(chat: Chat) -> int:
    for line in sys.stdin:
        outcome = chat.take(line)
        if outcome is Outcome.STOPPED:
            return _INTERRUPTED
        if outcome is Outcome.LEAVE:
            break
    return 0


def _on_a_terminal(chat: Chat, view: AnswerView, aside: Console) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (its import gives input() line editing and a history)
    while True:
        try:
            if chat.take(_ask(aside)) is Outcome.LEAVE:
                return
        except EOFError:
            aside.print()
            return
        except KeyboardInterrupt:
            aside.print()
            view.notice("Ctrl-D leaves")
        except TandemError as error:
            print_error(aside, error.message)


def _ask(aside: Console) -> str:
    """The next line. Where answers go into a file, the prompt does not."""
    if sys.stdout.isatty():
        return input(_PROMPT)
    aside.out(_PROMPT, end="")
    return input()
