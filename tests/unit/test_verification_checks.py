"""Verdicts of `tandem verify` on samples made by hand: what passes, what fails, and what nobody tested."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from tandem.verification.checks import ALL_SETS, FALSE_ALARM, LawLine, TextLine, Verdict, law_lines, text_lines
from tandem.verification.plan import (
    LAW_TOKENS,
    PARAMETER_SETS,
    PROMPT_TOKENS,
    Plan,
    Request,
    Stage,
    shared_prompt,
)
from tandem.verification.report import Report
from tandem.verification.sampler import Sample

PLAN = Plan(drafters=("model",), parameter_sets=PARAMETER_SETS[:2], num_samples=600, num_seeds=3)
FAIR = (0.4, 0.3, 0.2, 0.1)
STAGE = Stage.on(range(100, 140), [5, 5, 5, 6, 6, 7, 7, 8, 9])


def rounds(*, drafted: int = 2, accepted: int = 1, second: int | None = None) -> list[Sample]:
    """600 rounds of one law in the plan's order: plain, speculative, plain, speculative, for two parameter sets.

    `second` stands in place of every speculative sample's second token.
    """
    drawn = np.random.default_rng(3).choice(4, size=(600 * 4, LAW_TOKENS), p=FAIR).tolist()
    samples = [Sample(tuple(tokens), drafted, accepted) for tokens in drawn]
    for sample_index in range(0, len(samples), 2):
        samples[sample_index] = replace(samples[sample_index], drafted=0, accepted=0)
    if second is not None:
        for sample_index in range(1, len(samples), 2):
            first, _, third = samples[sample_index].token_ids
            samples[sample_index] = replace(samples[sample_index], token_ids=(first, second, third))
    return samples


def line_of(lines: Sequence[LawLine], law: str, parameters: str = "few") -> LawLine:
    return next(line for line in lines if (line.law, line.parameters) == (law, parameters))


def report_of(laws: Sequence[LawLine] = (), texts: Sequence[TextLine] = ()) -> Report:
    return Report(
        url="http://gateway",
        model="a model",
        base_seed=0,
        num_samples=600,
        seconds=1.0,
        allowed_ties=0.0,
        allow_untested=False,
        laws=tuple(laws),
        texts=tuple(texts),
    )


def test_samples_of_one_law_pass_and_say_what_they_could_have_seen() -> None:
    lines = law_lines(PLAN, rounds())
    assert {line.verdict for line in lines} == {Verdict.PASSED}
    assert len(lines) == 2 * 4 + 3
    assert line_of(lines, "token 2").visible == pytest.approx(0.2, abs=0.03)
    together = line_of(lines, "token 2", ALL_SETS)
    assert together.comparison.num_samples == 1200
    assert together.comparison.degrees == 6
    assert together.visible is not None
    assert together.visible < 0.15
    assert report_of(lines).passed


def test_a_wrong_second_token_fails_and_the_first_does_not() -> None:
    samples = [
        replace(sample, token_ids=(sample.token_ids[0], 0, *sample.token_ids[2:])) if i % 8 in (1, 3) else sample
        for i, sample in enumerate(rounds())
    ]
    lines = law_lines(PLAN, samples)
    for law in ("token 2", "first 3"):
        line = line_of(lines, law, ALL_SETS)
        assert line.verdict is Verdict.FAILED
        assert line.adjusted is not None
        assert line.adjusted < FALSE_ALARM
    assert line_of(lines, "token 1").verdict is Verdict.PASSED
    report = report_of(lines)
    assert not report.passed
    assert not replace(report, allow_untested=True).passed


@pytest.mark.parametrize(
    ("drafted", "accepted", "remark"),
    [(0, 0, "nothing was drafted"), (2, 0, "nothing was accepted"), (2, 2, "nothing was rejected")],
)
def test_idle_speculation_passes_nothing(drafted: int, accepted: int, remark: str) -> None:
    lines = law_lines(PLAN, rounds(drafted=drafted, accepted=accepted))
    assert {(line.verdict, line.remark) for line in lines} == {(Verdict.UNTESTED, remark)}
    report = report_of(lines)
    assert not report.passed
    assert replace(report, allow_untested=True).passed


def test_a_difference_counts_even_where_speculation_seems_idle() -> None:
    lines = law_lines(PLAN, rounds(drafted=2, accepted=2, second=3))
    assert line_of(lines, "token 2").verdict is Verdict.FAILED


def test_too_few_samples_pass_nothing() -> None:
    lines = law_lines(PLAN, rounds()[: 4 * 60])
    assert line_of(lines, "token 2").remark == "too few samples: 60"
    assert not report_of(lines).passed


def test_a_law_with_one_outcome_is_left_out_and_fails_nothing() -> None:
    samples = [replace(sample, token_ids=(9, *sample.token_ids[1:])) for sample in rounds()]
    lines = law_lines(PLAN, samples)
    line = line_of(lines, "token 1")
    assert (line.verdict, line.remark, line.adjusted) == (Verdict.UNTESTED, "only one outcome", None)
    assert report_of(lines).passed


def test_a_parameter_set_with_one_outcome_everywhere_is_not_tested() -> None:
    samples = [replace(sample, token_ids=(9, 9, 9)) if i % 4 < 2 else sample for i, sample in enumerate(rounds())]
    lines = law_lines(PLAN, samples)
    assert line_of(lines, "first 3").verdict is Verdict.UNTESTED
    assert not report_of(lines).passed


def equal_texts(*, drafted: int = 9, accepted: int = 4) -> list[Sample]:
    return [Sample((1, 2, 3), drafted, accepted) for _ in PLAN.case_requests(PLAN.cases(STAGE))]


def test_equal_texts_pass() -> None:
    lines = text_lines(PLAN, PLAN.cases(STAGE), equal_texts(), allowed_ties=0.0)
    assert [(line.rule, line.num_draft_tokens) for line in lines] == [
        (rule, k) for rule in ("coupled", "greedy") for k in (1, 3, 5, 8)
    ]
    assert {(line.verdict, line.num_texts) for line in lines if line.rule == "coupled"} == {(Verdict.PASSED, 3)}
    assert report_of(texts=lines).passed


def test_a_text_that_differs_is_named_with_its_place() -> None:
    samples = equal_texts()
    samples[2] = Sample((1, 7, 3), 9, 4)  # the first case, with 3 draft tokens
    samples[6] = Sample((1, 2), 9, 4)  # the second case, with 1
    cases = PLAN.cases(STAGE)
    short, long = text_lines(PLAN, cases, samples, allowed_ties=0.0)[:2]
    assert long.verdict is short.verdict is Verdict.FAILED
    [mismatch] = long.mismatches
    assert (mismatch.case, mismatch.position, mismatch.plain, mismatch.speculative) == (cases[0].name, 1, 2, 7)
    [mismatch] = short.mismatches
    assert (mismatch.case, mismatch.position, mismatch.plain, mismatch.speculative) == (cases[1].name, 2, 3, None)


def test_ties_are_forgiven_up_to_the_rate_and_still_listed() -> None:
    samples = equal_texts()
    samples[2] = Sample((1, 7, 3), 9, 4)
    for allowed, verdict in ((0.34, Verdict.PASSED), (0.33, Verdict.FAILED)):
        line = text_lines(PLAN, PLAN.cases(STAGE), samples, allowed_ties=allowed)[1]
        assert line.verdict is verdict
        assert len(line.mismatches) == 1


def test_texts_without_rejections_are_not_tested() -> None:
    lines = text_lines(PLAN, PLAN.cases(STAGE), equal_texts(drafted=4, accepted=4), allowed_ties=0.0)
    assert {(line.verdict, line.remark) for line in lines} == {(Verdict.UNTESTED, "nothing was rejected")}


def test_the_report_is_json_and_a_table_that_names_the_verdict() -> None:
    laws = law_lines(PLAN, rounds(second=3))
    texts = text_lines(PLAN, PLAN.cases(STAGE), equal_texts(), allowed_ties=0.0)
    report = report_of(laws, texts)
    document = json.loads(json.dumps(report.document()))
    assert document["passed"] is False
    assert document["num_failed"] > 0
    assert document["laws"][1]["verdict"] == "failed"
    assert document["texts"][0]["verdict"] == "passed"
    console = Console(width=130)
    with console.capture() as capture:
        console.print(report.render())
    assert "Speculation CHANGES what is said." in capture.get()


def test_no_two_requests_for_laws_have_one_seed_and_time_is_asked_between_rounds() -> None:
    rounds_left = iter([True, True, True, False])
    requests = list(PLAN.law_requests(STAGE, in_time=lambda: next(rounds_left)))
    assert len(requests) == 3 * len(PLAN.arms) == 12
    assert len({request.seed for request in requests}) == 12
    assert [request.drafter for request in requests[:4]] == [None, "model", None, "model"]
    seeds = {request.seed for request in (*PLAN.pilot(), *PLAN.calibration(STAGE), *PLAN.case_requests([]))}
    assert not seeds & {request.seed for request in requests}
    assert max(seeds | {request.seed for request in requests}) < 2**53


def test_the_prompt_lets_an_n_gram_drafter_guess_after_any_first_token() -> None:
    """Whichever of the four comes, some two-token match has the first choice behind it; every pair has a successor."""
    prompt = shared_prompt(range(100, 140), (5, 6, 7, 8))
    assert len(prompt) == PROMPT_TOKENS
    triples = [prompt[i : i + 3] for i in range(len(prompt) - 2)]
    for token in (5, 6, 7, 8):
        assert (prompt[-1], token, 5) in triples
        assert {triple[1] for triple in triples if triple[0] == token} >= {5, 6, 7, 8}
    assert len(shared_prompt((1, 2), (5,))) == PROMPT_TOKENS


def test_flattening_lowers_what_is_said_too_often() -> None:
    stage = STAGE.flattened([5] * 90 + [6] * 5)
    assert stage.biases[5] < stage.biases[6] < stage.biases[7] == stage.biases[8] == 100.0
    assert min(stage.biases.values()) >= 80.0


def test_a_request_says_how_it_is_decoded() -> None:
    request = Request(prompt=(1, 2), max_tokens=4, parameters={"temperature": 0.5}, seed=3)
    assert request.body()["speculation"] == {"enabled": False, "verification": "rejection"}
    body = replace(request, drafter="ngram", num_draft_tokens=5, rule="coupled").body()
    assert body["speculation"] == {
        "enabled": True,
        "verification": "coupled",
        "drafter": "ngram",
        "num_draft_tokens": 5,
    }
    assert (body["seed"], body["temperature"], body["return_token_ids"], body["ignore_eos"]) == (3, 0.5, True, True)
