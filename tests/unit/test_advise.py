"""From measured rounds to times, predictions, advice and reports, of pairs that are a few numbers."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources

import pytest
from rich.console import Console

from tandem.advise.page import page
from tandem.advise.predict import measured_speedup, profiles
from tandem.advise.report import document
from tandem.advise.study import ALL, Study, best_of, costs_of
from tandem.advise.tables import print_study
from tandem.advise.times import rising, times_together
from tandem.advise.verdict import choose, headline, paragraph, second_k
from tests.advised import MOST, NETWORK_SECONDS, PLAIN_SECONDS, REST_SECONDS, Pair, study_of

GOOD = Pair(rates={"easy": 0.85, "hard": 0.5}, hit_rate=0.5)
BAD = Pair(rates={"noise": 0.05, "more": 0.08}, draft_token_seconds=0.003)


@pytest.fixture(scope="module")
def good() -> Study:
    return study_of({"model": GOOD, "weak": Pair(rates={"easy": 0.3, "hard": 0.2}, draft_token_seconds=0.00001)})


@pytest.fixture(scope="module")
def bad() -> Study:
    return study_of({"model": BAD}, levels=(1,))


def test_every_k_is_predicted_as_it_is_then_measured() -> None:
    """Of 60 prompts with 120 tokens each. 3 % hold for 4 standard errors of the ratio, which is 0.7 % between seeds."""
    pair = Pair(rates={"one": 0.7}, num_prompts=60)
    study = study_of({"model": pair}, levels=(1,))
    plain = pair.answers(0)
    for k in (1, 2, 3, 5, 8):
        measured = measured_speedup(pair.answers(k, seed=4), plain)
        assert measured is not None
        assert study.curve("model", ALL)[k - 1].expected.estimate == pytest.approx(measured.estimate, rel=0.03)


def test_times_are_found_again() -> None:
    own = profiles(
        "m", GOOD.answers(MOST), GOOD.answers(0), asked=MOST, probes=GOOD.answers(3), categories=("easy",), all_name=ALL
    )
    times = own[ALL].times
    assert times.plain == pytest.approx(PLAIN_SECONDS + NETWORK_SECONDS + REST_SECONDS, rel=0.02)
    assert times.verify[0] == pytest.approx(PLAIN_SECONDS, rel=0.02)
    assert times.verify[5] == pytest.approx(PLAIN_SECONDS + 5 * 0.0004, rel=0.02)  # between 3 and 8, which were asked
    assert times.draft[4] == pytest.approx(0.004)
    assert times.hit_rate == pytest.approx(0.5, abs=0.1)
    assert own["easy"].rate == pytest.approx(0.85, abs=0.03)
    assert own[ALL].bytes_per_round == pytest.approx(500.0, rel=0.05)
    costs = costs_of(own[ALL], k=4)
    assert costs.verify_slope == pytest.approx(0.0004 / 0.0106, rel=0.1)
    assert costs.draft == pytest.approx(0.001 / 0.0106, rel=0.05)


def test_shared_forwards_take_their_means() -> None:
    """Each arm is a point: the mean of its drafted tokens, and of its seconds."""
    times = times_together([GOOD.answers(3), GOOD.answers(8)], GOOD.answers(0), most=MOST)
    assert times.verify[0] == pytest.approx(PLAIN_SECONDS, rel=0.02)
    assert times.verify[6] == pytest.approx(PLAIN_SECONDS + 6 * 0.0004, rel=0.03)


def test_times_between_points_never_fall() -> None:
    assert rising({0.0: 1.0, 2.0: 3.0, 3.0: 2.5}, most=4) == pytest.approx((1.0, 2.0, 3.0, 3.0, 3.0))
    assert rising({1.0: 1.0, 2.0: 2.0}, most=3) == pytest.approx((1.0, 1.0, 2.0, 3.0))
    assert rising({3.0: 0.5}, most=2) == (0.5, 0.5, 0.5)
    assert rising({}, most=1) == (0.0, 0.0)


def test_the_advice_names_draft_k_and_gain(good: Study) -> None:
    best = best_of(good.predictions, concurrency=1)
    words = paragraph(good)
    assert good.choices[0].worth
    assert best.drafter == "model"
    assert headline(good) == f"Speculate: model, k = {best.k}"
    assert f"the drafter model and {best.k} draft tokens a round" in words
    assert f"{best.expected.estimate:.2f} [" in words
    assert "gains most on easy" in words
    assert "were within" in words
    assert best.serial.estimate < best.expected.estimate < best.overlapped.estimate


def test_traffic_that_cannot_be_foretold_is_not_to_be_speculated_for(bad: Study) -> None:
    words = paragraph(bad)
    assert not bad.choices[0].worth
    assert headline(bad) == "Do not speculate"
    assert words.startswith("Do not speculate for this traffic, because ")
    assert "to break even" in words
    assert all(check.measured.estimate < 1.0 for check in bad.checks if check.category == ALL)


def test_a_measurement_that_disagrees_counts_more_than_the_prediction() -> None:
    """The pair that is measured afterwards accepts nothing: what was foretold does not hold."""
    study = study_of({"model": GOOD}, levels=(1,))
    best = study.choices[0].prediction
    (check,) = [each for each in study.checks if each.category == ALL and each.k == best.k]
    plain, poor = GOOD.answers(0), Pair(rates={"easy": 0.0, "hard": 0.0}).answers(best.k)
    measured = measured_speedup(poor, plain)
    assert measured is not None
    (choice,) = choose(study.predictions, [replace(check, measured=measured)])
    assert not choice.worth


@pytest.mark.parametrize(("best", "other"), [(1, 3), (2, 5), (3, 7), (4, 2), (7, 3), (8, 4)])
def test_the_second_point_lies_apart(best: int, other: int) -> None:
    assert second_k(best, most=8) == other


def test_the_json_has_every_figure_and_no_text_of_prompts(good: Study) -> None:
    text = json.dumps(document(good))
    found = json.loads(text)
    assert found["advice"]["speculate"] is True
    assert found["advice"]["paragraph"] == paragraph(good)
    assert len(found["predictions"]) == (2 * 3 + 2) * MOST
    assert {each["num_draft_tokens"] for each in found["predictions"]} == set(range(1, MOST + 1))
    assert all(len(each["accepted_by_position"]) == MOST for each in found["profiles"])
    assert "?" not in text  # each prompt is one
    assert found["workload"]["prompts"] == {"easy": 6, "hard": 6}


def test_the_terminal_report_begins_with_the_advice(good: Study) -> None:
    out = io.StringIO()
    print_study(good, Console(file=out))
    assert out.getvalue().startswith(headline(good))
    for title in ("Predicted and measured", "every k", "By load"):
        assert title in out.getvalue()


class _Reader(HTMLParser):
    """Tags that are opened and closed, and every attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.classes: set[str] = set()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        for name, value in attrs:
            if name == "class":
                self.classes.update((value or "").split())
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", ["good", "bad"])
def test_the_page_is_whole_and_asks_nobody(name: str, request: pytest.FixtureRequest) -> None:
    study: Study = request.getfixturevalue(name)
    html = page(study)
    reader = _Reader()
    reader.feed(html)
    assert reader.open == []
    assert reader.tags.count("svg") == (7 if len(study.loads) > 1 else 6)
    assert "script" not in reader.tags
    assert not {name for name, _ in reader.attributes} & {"src", "href", "style", "onclick"}
    assert "url(" not in html
    assert "&lt;made&gt; &amp; up" in html  # the model's name, which is not ours
    style = html.split("<style>")[1].split("</style>")[0]
    assert {each for each in reader.classes if f".{each}" not in style} <= {"mark", "even", "name"} | {"dashed"}
    for variable in re.findall(r"var\((--\w+)\)", style):
        assert f"{variable}:" in style
    numbers = [value for key, value in reader.attributes if key in ("x", "y", "cx", "cy", "width", "height", "d")]
    assert not any("nan" in str(value) or "inf" in str(value) for value in numbers)


def test_the_heatmap_has_the_pairs_and_the_break_even_line(good: Study) -> None:
    reader = _Reader()
    reader.feed(page(good))
    assert {"pair", "even", "h3", "h8"} <= reader.classes
    titles = page(good).count("predicted ")
    assert titles >= len(good.profiles)


def test_light_and_dark_give_every_colour() -> None:
    style = resources.files("tandem.advise").joinpath("page.css").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)")[:2]
    names = set(re.findall(r"(--\w+):", light.split("}")[0]))
    assert len(names) > 20
    assert set(re.findall(r"(--\w+):", dark)) == names
