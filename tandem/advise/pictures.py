"""The pictures of a study. Pure: each is SVG, as text, with its legend below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from tandem.advise.predict import Prediction, Stages
from tandem.advise.study import ALL, Study, best_of, costs_of
from tandem.advise.svg import WIDTH, Frame, Point, axes, box, dot, legend, line, path, picture, text, ticks
from tandem.speedup import Costs, best_speedup, break_even, expected_tokens, expected_tokens_at

# Where one colour of the heatmap ends and the next begins; the one that holds 1 is neutral.
_EDGES: Final = (0.6, 0.8, 0.95, 1.05, 1.25, 1.5, 2.0, 3.0)
_COLUMNS, _ROWS = 32, 18  # of the heatmap
_COST_RANGE: Final = (0.01, 1.0)
_ALL_ROUND: Final = 5.5  # radius of the dot that is a drafter on all prompts
_SHOWN_LENGTHS: Final = (1, 2, 4, 8, 16)
_SERIES: Final = ("s1", "s2", "s3", "s4", "s5", "s6")


def heatmap(study: Study) -> str:
    """Speed-up over acceptance rate and cost of a draft token, at the best k of each; the user's pairs on it."""
    choice = study.choices[0].prediction
    costs = costs_of(study.best, k=choice.k)
    frame = Frame(x_range=(0.0, 1.0), y_range=_COST_RANGE, height=300.0, log_y=True)
    low, high = _COST_RANGE
    rise = (high / low) ** (1.0 / _ROWS)
    parts: list[str] = []
    for row in range(_ROWS):
        cost = low * rise ** (row + 0.5)
        top, bottom = frame.y(low * rise ** (row + 1)), frame.y(low * rise**row)
        for column in range(_COLUMNS):
            rate = (column + 0.5) / _COLUMNS
            k, gain = best_speedup(rate, replace(costs, draft=cost), most=study.most)
            left, right = frame.x(column / _COLUMNS), frame.x((column + 1) / _COLUMNS)
            parts.append(
                # A little larger than its place: else there are hair lines between cells.
                box(left, top, right - left + 0.4, bottom - top + 0.4, f"h{_colour(gain)}",
                    title=f"acceptance {rate:.2f}, draft cost {cost:.3f}: {gain:.2f} times, k = {k}")
            )  # fmt: skip
    parts.append(path(_break_even_line(frame, costs, most=study.most), "even"))
    parts += axes(
        frame,
        x_ticks=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
        y_ticks=[0.01, 0.03, 0.1, 0.3, 1.0],
        x_name="acceptance rate",
        y_name="draft token / plain step",
        grid=False,
    )
    names = list(dict.fromkeys(profile.drafter for profile in study.profiles))
    for profile in sorted(study.profiles, key=lambda each: each.category == ALL):
        if profile.rate is None:
            continue
        best = max(study.curve(profile.drafter, profile.category), key=lambda each: each.expected.estimate)
        cost = min(high, max(low, profile.draft_cost))
        words = (
            f"{profile.drafter}, {profile.category}: acceptance {profile.rate:.2f}, draft cost "
            f"{profile.draft_cost:.4f}, predicted {best.expected.estimate:.2f} with k = {best.k}"
        )
        radius = _ALL_ROUND if profile.category == ALL else 3.2
        kind = f"pair {_SERIES[names.index(profile.drafter) % len(_SERIES)]}"
        # Free drafts lie on the lower edge, one above the other by drafter, so that none hides another.
        lift = 7.0 * (names.index(profile.drafter) + 1) if profile.draft_cost <= low else 0.0
        parts.append(dot(frame.x(profile.rate), frame.y(cost) - lift, radius, kind, title=words))
    edges = ["", *(f"{edge:g}" for edge in _EDGES), ""]
    scale = [
        (f"h{index}", f"{before} to {after}" if before and after else f"< {after}" if after else f"> {before}")
        for index, (before, after) in enumerate(pairwise(edges))
    ]
    pairs = [(_SERIES[index % len(_SERIES)], name) for index, name in enumerate(names)]
    label = "Heatmap of speed-up over acceptance rate and the cost of a draft token, with the break-even line"
    return (
        picture(parts, height=frame.height, label=label)
        + legend(scale)
        + legend([*pairs, ("even", "break-even")], kind="mark")
    )


def by_position(study: Study) -> str:
    """How often a round brings an accepted token at each position, beside the geometric model."""
    profile = study.best
    frame = Frame(x_range=(0.4, profile.asked + 0.6), y_range=(0.0, 1.0))
    parts = axes(
        frame,
        x_ticks=_whole(1, profile.asked),
        y_ticks=[0.0, 0.25, 0.5, 0.75, 1.0],
        x_name="position in the draft",
        y_name="share of rounds",
    )
    wide = 0.7 * (frame.x(2) - frame.x(1))
    for index, (drafted, accepted) in enumerate(
        zip(profile.positions.drafted, profile.positions.accepted, strict=True), start=1
    ):
        left = frame.x(index) - wide / 2
        for share, kind in ((drafted, "offered"), (accepted, "f1")):
            parts.append(
                box(left, frame.y(share), wide, frame.baseline - frame.y(share), kind,
                    title=f"position {index}: drafted in {drafted:.2f} of the rounds, accepted in {accepted:.2f}")
            )  # fmt: skip
    rate = profile.rate or 0.0
    points = [(frame.x(j), frame.y(rate**j)) for j in range(1, profile.asked + 1)]
    parts.append(path(points, "l2"))
    parts += [dot(x, y, 2.6, "f2") for x, y in points]
    keys = [("offered", "drafted"), ("s1", "accepted"), ("s2", f"geometric, {rate:.2f} to the power of the position")]
    return picture(parts, height=frame.height, label="Acceptance by position") + legend(keys)


def tokens_by_length(study: Study) -> str:
    """Tokens of a round against k: rounds replayed, by position, and geometric."""
    profile, curve = study.best, study.curve(study.best.drafter, ALL)
    replayed = [1.0, *(each.tokens_per_round for each in curve)]
    positions = expected_tokens(profile.positions.accepted)
    model = [expected_tokens_at(profile.rate or 0.0, k) for k in range(profile.asked + 1)]
    scale = ticks(max(*replayed, *positions, *model))
    frame = Frame(x_range=(0.0, float(profile.asked)), y_range=(0.0, scale[-1]))
    parts = axes(frame, x_ticks=_whole(0, profile.asked), y_ticks=scale, x_name="k", y_name="tokens a round")
    for values, kind in ((model, "l2 dashed"), (positions, "l3 dashed"), (replayed, "l1")):
        parts.append(path([(frame.x(k), frame.y(value)) for k, value in enumerate(values)], kind))
    keys = [("s1", "rounds gone through again"), ("s3", "by position alone"), ("s2", "geometric model")]
    return picture(parts, height=frame.height, label="Expected tokens of a round against k") + legend(keys)


def speed_by_length(study: Study) -> str:
    """Predicted speed-up against k, one request at a time, and what the checks measured."""
    curve = study.curve(study.best.drafter, ALL)
    series = {
        "always prepared (bound)": ("l3 dashed", [each.overlapped.estimate for each in curve]),
        "one after the other": ("l2 dashed", [each.serial.estimate for each in curve]),
        "as it runs here": ("l1", [each.expected.estimate for each in curve]),
    }
    checks = [each for each in study.checks if each.category == ALL and each.concurrency == 1 and each.k is not None]
    tops = [value for _, values in series.values() for value in values]
    tops += [check.measured.high or check.measured.estimate for check in checks]
    scale = ticks(max(1.1, *tops))
    frame = Frame(x_range=(0.0, float(study.most)), y_range=(0.0, scale[-1]))
    parts = axes(frame, x_ticks=_whole(0, study.most), y_ticks=scale, x_name="k", y_name="times as fast")
    parts.append(line((frame.left, frame.y(1.0)), (WIDTH - frame.right, frame.y(1.0)), "even"))
    for kind, values in series.values():
        parts.append(path([(frame.x(k), frame.y(value)) for k, value in enumerate([1.0, *values])], kind))
    for check in checks:
        x, found = frame.x(float(check.k or 0)), check.measured
        if found.low is not None and found.high is not None:
            parts.append(line((x, frame.y(found.low)), (x, frame.y(found.high)), "spread"))
        parts.append(
            dot(x, frame.y(found.estimate), 4.5, "seen", title=f"k = {check.k}: measured {found.estimate:.2f}")
        )
    keys = [("s1", "predicted, as it runs here"), ("s2", "never prepared"), ("s3", "always prepared: the bound")]
    return (
        picture(parts, height=frame.height, label="Speed-up against k, predicted and measured")
        + legend(keys)
        + legend([("seen", "measured, with its 95 % interval"), ("even", "plain decoding")], kind="mark")
    )


def stages(study: Study) -> str:
    """Where a round's time goes: plain decoding, and some k."""
    times = study.best.times
    # Plain decoding's network and rest are not parted by stage: what it takes beyond the forward is one figure.
    rows: list[tuple[str, Stages]] = [
        ("plain", Stages(draft=0.0, verify=times.verify[0], wait=0.0, rest=max(0.0, times.plain - times.verify[0])))
    ]
    curve = {each.k: each for each in study.curve(study.best.drafter, ALL)}
    chosen = study.choices[0].prediction.k
    rows += [(f"k = {k}", curve[k].stages) for k in sorted({*_SHOWN_LENGTHS, chosen} & set(curve))]
    scale = ticks(max(1e3 * each.total for _, each in rows), most=5)
    row = 26.0
    frame = Frame(
        x_range=(0.0, scale[-1]), y_range=(0.0, 1.0), left=64.0, right=52.0, height=52.0 + row * len(rows), bottom=42.0
    )
    parts: list[str] = []
    for value in scale:
        parts.append(line((frame.x(value), frame.top), (frame.x(value), frame.baseline), "grid"))
        parts.append(text(frame.x(value), frame.baseline + 16, f"{value:g}", anchor="middle"))
    for index, (name, each) in enumerate(rows):
        top, before = frame.top + row * index + 4.0, 0.0
        parts.append(text(frame.left - 6, top + 13, name, "strong" if name == f"k = {chosen}" else "", anchor="end"))
        for figure, seconds in zip(
            ("f1", "f2", "f3", "f4"), (each.verify, each.draft, each.wait, each.rest), strict=True
        ):
            after = before + 1e3 * seconds
            parts.append(
                box(frame.x(before), top, frame.x(after) - frame.x(before), row - 8, figure,
                    title=f"{name}: {1e3 * seconds:.2f} ms")
            )  # fmt: skip
            before = after
        parts.append(text(frame.x(before) + 5, top + 13, f"{before:.1f}"))
    parts.append(text((frame.left + WIDTH - frame.right) / 2, frame.height - 6, "ms a round", "name", anchor="middle"))
    keys = [("s1", "verify"), ("s2", "draft"), ("s3", "network"), ("s4", "rest: gateway, HTTP, client")]
    return picture(parts, height=frame.height, label="Time of a round by stage") + legend(keys)


def categories(study: Study) -> str:
    """By category of prompt: predicted at the chosen k, and measured."""
    choice = study.choices[0].prediction
    names = [each.category for each in study.profiles if each.drafter == choice.drafter]
    found = {
        each.category: each
        for each in study.predictions
        if (each.drafter, each.concurrency, each.k) == (choice.drafter, 1, choice.k)
    }
    checks = {each.category: each.measured for each in study.checks if each.concurrency == 1 and each.k == choice.k}
    tops = [each.expected.estimate for each in found.values()] + [
        ratio.high or ratio.estimate for ratio in checks.values()
    ]
    scale = ticks(max(1.1, *tops), most=5)
    row = 30.0
    left = 20.0 + 7.0 * min(16, max(map(len, names)))
    frame = Frame(
        x_range=(0.0, scale[-1]), y_range=(0.0, 1.0), left=left, right=40.0, height=52.0 + row * len(names), bottom=42.0
    )
    parts: list[str] = []
    labels: list[str] = []
    for value in scale:
        parts.append(line((frame.x(value), frame.top), (frame.x(value), frame.baseline), "grid"))
        parts.append(text(frame.x(value), frame.baseline + 16, f"{value:g}", anchor="middle"))
    for index, name in enumerate(names):
        top = frame.top + row * index + 5.0
        middle = top + (row - 10) / 2
        value = found[name].expected.estimate
        shown = name.replace("_", " ")
        parts.append(text(left - 6, middle + 4, shown if len(shown) <= 16 else f"{shown[:15]}…", anchor="end"))
        parts.append(
            box(
                frame.x(0.0), top, frame.x(value) - frame.x(0.0), row - 10, "f1", title=f"{name}: predicted {value:.2f}"
            )
        )
        end = frame.x(value)
        if (seen := checks.get(name)) is not None:
            if seen.low is not None and seen.high is not None:
                parts.append(line((frame.x(seen.low), middle), (frame.x(seen.high), middle), "spread"))
                end = max(end, frame.x(seen.high))
            parts.append(
                dot(frame.x(seen.estimate), middle, 4.5, "seen", title=f"{name}: measured {seen.estimate:.2f}")
            )
            end = max(end, frame.x(seen.estimate) + 4.5)
        labels.append(text(end + 5, middle + 4, f"{value:.2f}", "label"))
    parts.append(line((frame.x(1.0), frame.top), (frame.x(1.0), frame.baseline), "even"))
    parts += labels  # above the line
    parts.append(text((left + WIDTH - frame.right) / 2, frame.height - 6, "times as fast", "name", anchor="middle"))
    return (
        picture(parts, height=frame.height, label="Speed-up by category of prompt")
        + legend([("s1", f"predicted, k = {choice.k}")])
        + legend([("seen", "measured"), ("even", "plain decoding")], kind="mark")
    )


def loads(study: Study) -> str:
    """Predicted speed-up against k at every load."""
    drafter = study.best.drafter
    curves = {load.concurrency: study.curve(drafter, ALL, concurrency=load.concurrency) for load in study.loads}
    scale = ticks(max(1.1, *(each.expected.estimate for curve in curves.values() for each in curve)))
    frame = Frame(x_range=(0.0, float(study.most)), y_range=(0.0, scale[-1]))
    parts = axes(frame, x_ticks=_whole(0, study.most), y_ticks=scale, x_name="k", y_name="times as fast")
    parts.append(line((frame.left, frame.y(1.0)), (WIDTH - frame.right, frame.y(1.0)), "even"))
    keys: list[tuple[str, str]] = []
    for index, (concurrency, curve) in enumerate(curves.items()):
        number = index % len(_SERIES) + 1
        parts.append(path(_points(frame, curve), f"l{number}"))
        best = best_of(curve, concurrency=concurrency)
        parts.append(
            dot(frame.x(best.k), frame.y(best.expected.estimate), 4.0, f"f{number}",
                title=f"{concurrency} at once: {best.expected.estimate:.2f} with k = {best.k}")
        )  # fmt: skip
        keys.append((f"s{number}", f"{concurrency} at once: k = {best.k} gives {best.expected.estimate:.2f}"))
    return picture(parts, height=frame.height, label="Speed-up against k by load") + legend(keys)


def _points(frame: Frame, curve: Sequence[Prediction]) -> list[Point]:
    return [(frame.x(0.0), frame.y(1.0)), *((frame.x(each.k), frame.y(each.expected.estimate)) for each in curve)]


def _break_even_line(frame: Frame, costs: Costs, *, most: int) -> list[Point]:
    low, high = frame.y_range
    points: list[Point] = []
    for step in range(61):
        cost = low * (high / low) ** (step / 60)
        rate = break_even(replace(costs, draft=cost), most=most)
        if rate is not None:
            points.append((frame.x(rate), frame.y(cost)))
    return points


def _colour(gain: float) -> int:
    return sum(gain >= edge for edge in _EDGES)


def _whole(first: int, last: int) -> list[float]:
    """Whole numbers, not too many of them."""
    step = max(1, round((last - first) / 8))
    return [float(value) for value in range(first, last + 1, step)]
