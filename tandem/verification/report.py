"""What a run found, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.verification.checks import FALSE_ALARM, POWER, LawLine, TextLine, Verdict

_STYLES = {Verdict.PASSED: "green", Verdict.FAILED: "bold red", Verdict.UNTESTED: "yellow"}
_MAX_LISTED = 10  # mismatches on the terminal; the JSON has all


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run. `allow_untested`: what could not be tested does not fail it."""

    url: str
    model: str
    base_seed: int
    num_samples: int  # for each arm
    seconds: float
    allowed_ties: float
    allow_untested: bool
    laws: tuple[LawLine, ...]
    texts: tuple[TextLine, ...]

    @property
    def passed(self) -> bool:
        return not self.num_failed and (self.allow_untested or not self.num_untested)

    @property
    def num_failed(self) -> int:
        laws = sum(line.verdict is Verdict.FAILED for line in self.laws)
        return laws + sum(line.verdict is Verdict.FAILED for line in self.texts)

    @property
    def num_untested(self) -> int:
        """Lines without a verdict, those not counted where the model leaves nothing to test."""
        laws = sum(line.verdict is Verdict.UNTESTED and not line.excused for line in self.laws)
        return laws + sum(line.verdict is Verdict.UNTESTED for line in self.texts)

    def document(self) -> dict[str, Any]:
        """For json.dumps: the figures of every line, and what was promised about them."""
        return {
            "url": self.url,
            "model": self.model,
            "passed": self.passed,
            "num_failed": self.num_failed,
            "num_untested": self.num_untested,
            "false_alarm": FALSE_ALARM,
            "power": POWER,
            "base_seed": self.base_seed,
            "samples_per_arm": self.num_samples,
            "seconds": round(self.seconds, 1),
            "allowed_ties": self.allowed_ties,
            "allow_untested": self.allow_untested,
            "laws": [_plain(line) for line in self.laws],
            "texts": [_plain(line) for line in self.texts],
        }

    def render(self) -> RenderableType:
        """Tables and a closing sentence."""
        parts: list[RenderableType] = []
        if self.laws:
            parts.append(_law_table(self.laws))
        if self.texts:
            parts += [_text_table(self.texts), *_mismatches(self.texts)]
        return Group(*parts, *self._closing())

    def _closing(self) -> Sequence[Text]:
        tests = sum(line.adjusted is not None for line in self.laws)
        words = [
            Text(
                f"p: after Holm's correction for {tests} tests. Below {FALSE_ALARM:g} fails: right services do in at "
                f"most {FALSE_ALARM:.2%} of all runs. visible: the smallest total variation distance that the line "
                f"finds with probability {POWER:g}."
            )
        ]
        if self.passed:
            verdict = Text("Speculation does not change what is said, as far as these samples show.", "bold green")
        elif self.num_failed:
            verdict = Text("Speculation CHANGES what is said.", "bold red")
        else:
            verdict = Text(
                f"{self.num_untested} lines were not tested: no verdict (--allow-untested accepts that).", "bold yellow"
            )
        return [*words, verdict + Text(f" {self.model}, {self.seconds:.0f} s", "dim")]


def print_report(report: Report, console: Console) -> None:
    """On a narrow terminal or into a pipe nothing is cut off."""
    if not console.is_terminal:
        console = Console(file=console.file, highlight=False, width=120)
    console.print(report.render())


def _law_table(lines: Sequence[LawLine]) -> Table:
    table = _table("Laws, rejection rule", "parameters", "drafter", "law")
    for name in ("samples", "accepted/drafted", "outcomes", "p", "visible"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    before: tuple[str, str] | None = None
    remark = ""
    for line in lines:
        group = line.drafter, line.parameters
        if group != before:
            table.add_section()
            remark = ""
        table.add_row(
            *((line.parameters, line.drafter) if group != before else ("", "")),
            line.law,
            f"2 x {line.comparison.num_samples}",
            f"{line.accepted}/{line.drafted}",
            str(line.comparison.num_cells),
            "-" if line.adjusted is None else f"{line.adjusted:.2g}",
            "-" if line.visible is None else f"{line.visible:.2f}",
            _verdict(line.verdict, line.remark if line.remark != remark else ""),
        )
        before, remark = group, line.remark
    return table


def _text_table(lines: Sequence[TextLine]) -> Table:
    table = _table("Texts, token for token", "rule", "drafter")
    for name in ("draft tokens", "texts", "accepted/drafted", "different"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for line in lines:
        table.add_row(
            line.rule,
            line.drafter,
            str(line.num_draft_tokens),
            str(line.num_texts),
            f"{line.accepted}/{line.drafted}",
            str(len(line.mismatches)),
            _verdict(line.verdict, line.remark),
        )
    return table


def _mismatches(lines: Sequence[TextLine]) -> list[Text]:
    found = [(line, mismatch) for line in lines for mismatch in line.mismatches]
    words = [
        Text(
            f"{line.rule}, {line.drafter}, {line.num_draft_tokens} draft tokens, {mismatch.case}: token "
            f"{mismatch.position + 1} is {mismatch.speculative}, without speculation {mismatch.plain}",
            "red" if line.verdict is Verdict.FAILED else "yellow",
        )
        for line, mismatch in found[:_MAX_LISTED]
    ]
    return words + ([Text(f"and {len(found) - _MAX_LISTED} more")] if len(found) > _MAX_LISTED else [])


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _verdict(verdict: Verdict, remark: str) -> Text:
    return Text(f"{verdict.value}: {remark}" if remark else verdict.value, _STYLES[verdict])


def _plain(line: LawLine | TextLine) -> dict[str, Any]:
    return {**asdict(line), "verdict": line.verdict.name.lower()}
