"""What a run found, as JSON for programs. No prompts and no answers are in it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from tandem.advise.predict import Prediction, Profile
from tandem.advise.study import Check, Study, costs_of
from tandem.advise.verdict import headline, paragraph
from tandem.bench.statistics import CONFIDENCE
from tandem.speedup import break_even

_FORMAT: Final = 1  # raised when a key changes its meaning or goes away


def document(study: Study) -> dict[str, Any]:
    """For json.dumps."""
    return {
        "format": _FORMAT,
        "began": study.began,
        "seconds": round(study.seconds, 1),
        "advice": {
            "speculate": study.choices[0].worth,
            "headline": headline(study),
            "paragraph": paragraph(study),
            "by_concurrency": [
                {
                    "concurrency": choice.concurrency,
                    "speculate": choice.worth,
                    "drafter": choice.prediction.drafter,
                    "num_draft_tokens": choice.prediction.k,
                    "predicted": asdict(choice.prediction.expected),
                    "measured": None if choice.measured is None else asdict(choice.measured),
                }
                for choice in study.choices
            ],
        },
        "confidence": CONFIDENCE,
        "machine": dict(study.machine),
        "served": asdict(study.served),
        "workload": {
            "name": study.workload.name,
            "prompts": {
                category: sum(prompt.category == category for prompt in study.workload.prompts)
                for category in study.workload.categories
            },
        },
        "sampling": asdict(study.sampling),
        "plain_decoding": [asdict(load) for load in study.loads],
        "profiles": [_profile(each) for each in study.profiles],
        "predictions": [_prediction(each) for each in study.predictions],
        "checks": [_check(each) for each in study.checks],
        "failures": [asdict(failure) for failure in study.failures],
    }


def _profile(profile: Profile) -> dict[str, Any]:
    costs = costs_of(profile, k=profile.asked)
    return {
        "drafter": profile.drafter,
        "category": profile.category,
        "asked": profile.asked,
        "num_answers": len(profile.answers),
        "acceptance_rate": profile.rate,
        "drafted_by_position": profile.positions.drafted,
        "accepted_by_position": profile.positions.accepted,
        "seconds_by_drafted_tokens": {
            "verify": profile.times.verify,
            "draft": profile.times.draft,
            "network": profile.times.wait,
        },
        "rest_seconds": profile.times.rest,
        "plain_seconds_per_token": profile.times.plain,
        "prepared_rate": profile.times.hit_rate,
        "bytes_per_round": profile.bytes_per_round,
        "costs_in_plain_steps": asdict(costs),
        "break_even_acceptance_rate": break_even(costs, most=profile.asked),
    }


def _prediction(each: Prediction) -> dict[str, Any]:
    return {
        "drafter": each.drafter,
        "concurrency": each.concurrency,
        "category": each.category,
        "num_draft_tokens": each.k,
        "tokens_per_round": each.tokens_per_round,
        "round_seconds": asdict(each.stages),
        "speedup": asdict(each.expected),
        "speedup_serial": asdict(each.serial),
        "speedup_overlapped": asdict(each.overlapped),
        "tokens_per_second": each.tokens_per_second,
    }


def _check(check: Check) -> dict[str, Any]:
    return {
        "drafter": check.drafter,
        "concurrency": check.concurrency,
        "category": check.category,
        "num_draft_tokens": "auto" if check.k is None else check.k,
        "predicted": None if check.predicted is None else asdict(check.predicted),
        "measured": asdict(check.measured),
        "error": check.error,
        "predicted_tokens_per_round": check.predicted_tokens,
        "measured_tokens_per_round": check.measured_tokens,
    }
