"""The report as one HTML file: nothing from elsewhere, no scripts, light or dark as the reader's machine is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from tandem.advise.pictures import by_position, categories, heatmap, loads, speed_by_length, stages, tokens_by_length
from tandem.advise.study import ALL, Study
from tandem.advise.verdict import headline, paragraph
from tandem.bench.report import provenance
from tandem.bench.statistics import Ratio

_NOTHING = "-"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(study: Study) -> str:
    """The whole file. Every word that is not ours is escaped."""
    style = resources.files("tandem.advise").joinpath("page.css").read_text(encoding="utf-8")
    first = study.choices[0]
    figures = [
        _figure(
            "Is it worth it?",
            "Speed-up at the best k, by how much is accepted and what a draft token costs, with this target's slope "
            "and overhead. Large dots: a drafter on all prompts; small ones: its categories. Free drafts lie at the "
            "bottom.",
            heatmap(study),
        ),
        _figure("How many draft tokens?", "Speed-up against k, one request at a time.", speed_by_length(study)),
        _figure(
            "By kind of prompt",
            "Bars and figures are predicted, dots measured, at the chosen k.",
            categories(study),
        ),
        _figure(
            "Acceptance by position",
            f"Drafter {study.best.drafter}, asked for {study.best.asked} tokens. Where bars fall more slowly than the "
            "line, long drafts are worth more than a constant rate would say.",
            by_position(study),
        ),
        _figure("Tokens of a round", "The target's own token included.", tokens_by_length(study)),
        _figure("Where a round's time goes", "One request at a time, one stage after the other.", stages(study)),
    ]
    if len(study.loads) > 1:
        figures.append(_figure("Under load", "Speed-up over plain decoding at the same load.", loads(study)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>tandem advise: {escape(headline(study))}</title><style>{style}</style></head><body><header>"
        f'<p class="over">{escape(study.served.model["id"])} · {len(study.workload.prompts)} prompts of '
        f"{escape(study.workload.name)}</p>"
        f'<h1 class="{"yes" if first.worth else "no"}">{escape(headline(study))}</h1>'
        f'<p class="advice">{escape(paragraph(study))}</p></header>'
        f'{_numbers(study)}<main><div class="figures">{"".join(figures)}</div>'
        f"<section><h2>Predicted and measured</h2>{_checks(study)}</section>"
        f"<section><h2>By drafter and category</h2>{_profiles(study)}</section>"
        f"<section><h2>By load</h2>{_loads(study)}</section></main>"
        f"<footer>{''.join(f'<p>{escape(words)}</p>' for words in _about(study))}</footer></body></html>\n"
    )


def _numbers(study: Study) -> str:
    choice, profile = study.choices[0], study.best
    best = choice.prediction
    cards = [
        ("predicted, times as fast", f"{best.expected.estimate:.2f}", _interval(best.expected)),
        ("measured, times as fast", _NOTHING, "not checked")
        if choice.measured is None
        else ("measured, times as fast", f"{choice.measured.estimate:.2f}", _interval(choice.measured)),
        ("best k", str(best.k), f"drafter {best.drafter}"),
        ("accepted", _NOTHING if profile.rate is None else f"{profile.rate:.2f}", "of tokens asked for"),
        ("tokens a round", f"{best.tokens_per_round:.2f}", f"in the time of {best.steps:.2f} plain ones"),
        ("bytes a round", f"{profile.bytes_per_round:.0f}", "draft messages, both hops"),
    ]
    inner = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in cards
    )
    return f'<dl class="numbers">{inner}</dl>'


def _checks(study: Study) -> str:
    rows = [
        (
            each.category,
            str(each.concurrency),
            "auto" if each.k is None else str(each.k),
            _ratio(each.predicted),
            _ratio(each.measured),
            _percent(each.error),
            f"{_NOTHING if each.predicted_tokens is None else format(each.predicted_tokens, '.2f')} / "
            f"{each.measured_tokens:.2f}",
        )
        for each in study.checks
    ]
    return _table(
        ("category", "at once", "k", "predicted", "measured", "error", "tokens a round, both"), rows, whole=ALL
    )


def _profiles(study: Study) -> str:
    rows: list[Sequence[str]] = []
    for profile in study.profiles:
        best = max(study.curve(profile.drafter, profile.category), key=lambda each: each.expected.estimate)
        rows.append(
            (
                profile.category,
                profile.drafter,
                _NOTHING if profile.rate is None else f"{profile.rate:.2f}",
                f"{profile.draft_cost:.3f}",
                f"{profile.times.hit_rate:.2f}",
                str(best.k),
                f"{best.tokens_per_round:.2f}",
                _ratio(best.expected),
                f"{profile.bytes_per_round:.0f}",
            )
        )
    names = ("category", "drafter", "accepted", "draft cost", "prepared", "k", "tokens a round", "predicted", "bytes")
    return _table(names, rows, whole=ALL)


def _loads(study: Study) -> str:
    rows = [
        (
            str(load.concurrency),
            f"{load.tokens_per_second:.1f}",
            f"{load.total_tokens_per_second:.1f}",
            str(choice.prediction.k),
            _ratio(choice.prediction.expected),
            _ratio(choice.measured),
            "yes" if choice.worth else "no",
        )
        for load, choice in zip(study.loads, study.choices, strict=True)
    ]
    names = ("at once", "plain tokens/s, one", "all together", "best k", "predicted", "measured", "speculate")
    return _table(names, rows)


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], *, whole: str = "") -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr{' class=whole' if row[0] == whole else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(title: str, caption: str, content: str) -> str:
    return f"<figure><h2>{escape(title)}</h2><figcaption>{escape(caption)}</figcaption>{content}</figure>"


def _about(study: Study) -> list[str]:
    return [
        "Intervals: 95 %, over prompts. A prediction takes the measured rounds with the largest k, goes through them "
        "with a smaller one, and adds up the measured times of such rounds.",
        *provenance(study),
    ]


def _ratio(ratio: Ratio | None) -> str:
    return _NOTHING if ratio is None else f"{ratio.estimate:.2f} {_interval(ratio)}".strip()


def _interval(ratio: Ratio) -> str:
    return "" if ratio.low is None or ratio.high is None else f"[{ratio.low:.2f}, {ratio.high:.2f}]"


def _percent(part: float | None) -> str:
    return _NOTHING if part is None else f"{round(100.0 * part):+d} %"
