"""From results to rows, and to tables for a terminal."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.peers.arms import BASELINE
from benchmarks.peers.peer import Prompt
from benchmarks.peers.run import Outcome
from tandem.bench.statistics import Ratio, Spread, median_ratio, paired_ratios, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm. Rates are tokens per second, by prompt; times are seconds; None: not known, or nothing was measured."""

    name: str
    setting: str
    num_prompts: int
    rate: Spread | None
    rate_by_category: dict[str, float]  # medians
    decode_rate: Spread | None
    first_token_seconds: Spread | None
    ratio: Ratio | None  # of the baseline's rate, paired by prompt: the median, and its 95 % interval
    ratio_spread: Spread | None
    tokens_per_call: float | None  # over all answers
    reason: str | None


def make_rows(outcomes: Sequence[Outcome], prompts: Sequence[Prompt]) -> list[Row]:
    """A row for each outcome, the fastest first; those without results last."""
    baseline = next((outcome for outcome in outcomes if outcome.arm.name == BASELINE), None)
    rows = [_row(outcome, baseline, prompts) for outcome in outcomes]
    return sorted(rows, key=lambda row: -row.rate.median if row.rate else 0.0)


def _row(outcome: Outcome, baseline: Outcome | None, prompts: Sequence[Prompt]) -> Row:
    answered = [
        (prompt, outcome.results[prompt.question_id]) for prompt in prompts if prompt.question_id in outcome.results
    ]
    results = [result for _, result in answered]
    ratios = list(paired_ratios(_rates(outcome), _rates(baseline)).values()) if baseline else []
    medians: dict[str, float] = {}
    for category in dict.fromkeys(prompt.category for prompt, _ in answered):
        found = spread([result.tokens_per_second for prompt, result in answered if prompt.category == category])
        assert found is not None, "a category of no prompts"
        medians[category] = found.median
    calls = [(result.num_tokens, result.num_calls) for result in results if result.num_calls]
    return Row(
        name=outcome.arm.name,
        setting=outcome.setting or "",
        num_prompts=len(results),
        rate=spread([result.tokens_per_second for result in results]),
        rate_by_category=medians,
        decode_rate=spread([rate for result in results if (rate := result.decode_tokens_per_second) is not None]),
        first_token_seconds=spread([result.first_token_seconds for result in results]),
        ratio=median_ratio(ratios),
        ratio_spread=spread(ratios),
        tokens_per_call=sum(tokens for tokens, _ in calls) / sum(count for _, count in calls) if calls else None,
        reason=outcome.reason,
    )


def _rates(outcome: Outcome) -> dict[tuple[str, Hashable], float]:
    return {(question, 0): result.tokens_per_second for question, result in outcome.results.items()}


def summary_table(rows: Sequence[Row]) -> Table:
    """The main table: what each peer makes of the same prompts."""
    table = Table(title="Tokens per second at each peer's best setting: medians over prompts")
    for name in ("peer", "setting"):
        table.add_column(name, overflow="fold")
    for name in ("tokens/s", "decode only", "first token, ms", f"of {BASELINE}", "middle half", "tokens a call"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.rate is None:
            table.add_row(f"{row.name} *")
            continue
        table.add_row(
            row.name if row.reason is None else f"{row.name} *",
            row.setting,
            f"{row.rate.median:.1f}",
            "" if row.decode_rate is None else f"{row.decode_rate.median:.1f}",
            "" if row.first_token_seconds is None else f"{1000 * row.first_token_seconds.median:.0f}",
            "" if row.ratio is None else f"{row.ratio.estimate:.2f}",
            ""
            if row.ratio_spread is None
            else f"{row.ratio_spread.lower_quartile:.2f} to {row.ratio_spread.upper_quartile:.2f}",
            "" if row.tokens_per_call is None else f"{row.tokens_per_call:.2f}",
        )
    broken = [f"* {row.name}: {row.reason or 'no results'}" for row in rows if row.reason or not row.rate]
    table.caption = "\n".join(broken) or None
    return table


def category_table(rows: Sequence[Row]) -> Table:
    """Tokens per second by category."""
    categories = list(dict.fromkeys(category for row in rows for category in row.rate_by_category))
    table = Table(title="Tokens per second by category: medians")
    table.add_column("peer")
    for category in categories:
        table.add_column(category.replace("_", " "), justify="right")
    for row in rows:
        if row.rate is not None:
            rates = [row.rate_by_category.get(category) for category in categories]
            table.add_row(row.name, *("" if rate is None else f"{rate:.1f}" for rate in rates))
    return table
