"""The picture of a run: how much faster each category is, and tokens per second as more is asked at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tandem.bench.arms import BASELINE
from tandem.bench.report import Report
from tandem.bench.summary import ALL, Line
from tandem.errors import InvalidRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS: Final = (".svg", ".png")
_GREY: Final = "#6b7280"
# Okabe and Ito's colours, apart for every kind of colour blindness; without the yellow, which is too light for bars.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS: Final = "osD^v<>"
_BAR: Final = 0.8  # of the place that a category has


def check_chart(path: Path) -> None:
    """Raise InvalidRequest where the picture could not be drawn in the end; before the run, not after it."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidRequest(f"--chart {path.name}: must end in {' or '.join(FORMATS)}", param="chart")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidRequest(
            "--chart needs matplotlib, which is missing: pip install 'tandem-serve[bench]'", param="chart"
        ) from None


def draw(report: Report, path: Path) -> None:
    """Write the picture. Raises InvalidRequest as `check_chart` does, and where the file cannot be written."""
    check_chart(path)
    from matplotlib.figure import Figure

    lines = report.lines
    names = [arm.name for arm in report.arms if arm.name != BASELINE.name]
    levels = sorted({line.concurrency for line in lines})
    categories = list(dict.fromkeys(line.category for line in lines))
    height = max(4.0, 1.2 + len(categories) * max(0.5, 0.22 * len(names)))
    figure = Figure(figsize=(11.0, height), layout="constrained", dpi=150)
    speed, load = figure.subplots(1, 2, width_ratios=(3, 2))
    colours = dict(zip(names, _shades(len(names)), strict=True))
    _draw_speed(speed, [line for line in lines if line.concurrency == min(levels, default=1)], categories, colours)
    _draw_load(load, [line for line in lines if line.category == categories[-1]] if lines else [], levels, colours)
    figure.suptitle(
        f"{report.served.model['id']}: {len(report.workload.prompts)} prompts of {report.workload.name}, "
        f"{report.machine['cpu']}",
        x=0.01,
        ha="left",
        fontsize=10,
        color=_GREY,
    )
    try:
        figure.savefig(path)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}", param="chart") from error


def _draw_speed(axes: Axes, lines: Sequence[Line], categories: Sequence[str], colours: dict[str, str]) -> None:
    thickness = _BAR / max(1, len(colours))
    ends = [1.0]
    for place, (arm, colour) in enumerate(colours.items()):
        for line in lines:
            ratio = line.ratios and line.ratios.decode_speed
            if line.arm != arm or not ratio:
                continue
            height = categories.index(line.category) - _BAR / 2 + (place + 0.5) * thickness
            axes.barh(height, ratio.estimate, thickness * 0.92, color=colour)
            end = ratio.estimate
            if ratio.low is not None and ratio.high is not None:
                interval = [ratio.low, ratio.high]
                for shade, width in (("white", 3.2), ("black", 1.4)):  # to be seen on dark bars too
                    axes.plot(interval, [height, height], color=shade, lw=width, solid_capstyle="butt")
                end = max(end, ratio.high)
            axes.annotate(
                f"{ratio.estimate:.2f}", (end, height), xytext=(4, 0), textcoords="offset points", va="center", size=8
            )
            ends.append(end)
    axes.axvline(1.0, color=_GREY, lw=1.0, ls=(0, (4, 3)))
    axes.set_xlim(0.0, 1.12 * max(ends))
    axes.set_yticks(range(len(categories)), [category.replace("_", " ") for category in categories])
    axes.set_ylim(max(1, len(categories)) - 0.5, -0.5)  # the first on top
    if ALL in categories:
        axes.get_yticklabels()[-1].set_fontweight("bold")
    level = lines[0].concurrency if lines else 1
    at_once = "one request at a time" if level == 1 else f"{level} requests at once"
    axes.set_title(f"Decoding speed over plain decoding, {at_once}", loc="left", fontsize=11)
    axes.set_xlabel("times as fast: median of pairs, black: 95 % interval")
    axes.tick_params(axis="y", length=0)
    _plain(axes, grid="x")


def _draw_load(axes: Axes, lines: Sequence[Line], levels: Sequence[int], colours: dict[str, str]) -> None:
    highest = 1.0
    for index, (arm, colour) in enumerate({BASELINE.name: _GREY, **colours}.items()):
        rates = {
            levels.index(line.concurrency): line.total_tokens_per_second
            for line in lines
            if line.arm == arm and line.total_tokens_per_second is not None
        }
        if rates:
            marker = _MARKERS[index % len(_MARKERS)]
            axes.plot(list(rates), list(rates.values()), color=colour, marker=marker, lw=1.8, label=arm)
            highest = max(highest, *rates.values())
    axes.set_xticks(range(len(levels)), [str(level) for level in levels])
    axes.set_xlim(-0.4, len(levels) - 0.6)
    axes.set_ylim(0.0, 1.1 * highest)
    axes.set_xlabel("requests at once")
    axes.set_title("Tokens per second, all requests together", loc="left", fontsize=11)
    if axes.lines:
        axes.legend(frameon=False, title="arm", alignment="left", ncols=2 if len(colours) > 6 else 1)
    _plain(axes, grid="y")


def _plain(axes: Axes, *, grid: str) -> None:
    for side in ("top", "right", *(("left",) if grid == "x" else ())):
        axes.spines[side].set_visible(False)
    axes.grid(axis=grid, color="#e5e7eb", lw=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def _shades(count: int) -> list[str]:
    """So many colours: distinct ones, or where these do not suffice (a sweep) a scale."""
    if count <= len(_COLOURS):
        return list(_COLOURS[:count])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    scale = colormaps["cividis"]
    return [to_hex(scale(0.9 * index / (count - 1))) for index in range(count)]
