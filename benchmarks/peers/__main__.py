"""`python -m benchmarks.peers`: tune, measure, print the tables, write the figures. `make bench-peers` runs it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers.arms import ARMS, THREADS, Arm, chosen
from benchmarks.peers.choices import extremes
from benchmarks.peers.environments import why_missing
from benchmarks.peers.facts import bind_to_cores, first_cores, machine_facts
from benchmarks.peers.families import OWN, make_peer
from benchmarks.peers.peer import Peer
from benchmarks.peers.prompts import Prompts, bundled_model, prepare
from benchmarks.peers.run import Limits, MakePeer, Outcome, measure, tune
from benchmarks.peers.tables import Row, category_table, make_rows, summary_table
from gateway.tokenizer import Tokenizer
from tandem.errors import TandemError
from tandem.models.tokenizer_files import tokenizer_files


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that peers are stopped as they should be
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 140)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {line}", file=sys.stderr, flush=True)

    try:
        arms = chosen(options.arm, threads=options.threads)
        cores = options.cores or first_cores(2)
        bind_to_cores(cores)
        facts = machine_facts(cores)
        model = bundled_model(say)
        tokenizer = Tokenizer.from_files(tokenizer_files(model.folder))
        prompts = prepare(tokenizer, per_category=options.prompts, categories=options.category)
    except (ValueError, TandemError) as error:
        print(f"bench-peers: {error}", file=sys.stderr)
        return 1

    def make(family: str) -> Peer:
        return make_peer(family, model, tokenizer)

    limits = Limits(max_tokens=options.max_tokens, tuning_tokens=min(64, options.max_tokens))
    outcomes = [Outcome(arm=arm) for arm in arms]
    _choose_settings(make, outcomes, prompts, limits, say, quick=options.no_tuning)
    say("all prompts, in turn")
    measure(make, outcomes, prompts.measured, extremes(prompts.tuning), limits, say)
    rows = make_rows(outcomes, prompts.measured)
    for table in (summary_table(rows), category_table(rows)):
        console.print(table)
    versions = {name: version for outcome in outcomes for name, version in outcome.versions.items()}
    console.print(", ".join(f"{name} {version}" for name, version in versions.items()), highlight=False)
    console.print(f"{facts['processor']}, cores {cores}, commit {facts['commit'][:12]}", highlight=False)
    if options.json:
        content = _figures(facts, limits, rows, outcomes, prompts)
        options.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        say(f"figures: {options.json}")
    return 0 if any(row.rate for row in rows) else 1


def _choose_settings(
    make: MakePeer, outcomes: Sequence[Outcome], prompts: Prompts, limits: Limits, say: Any, *, quick: bool
) -> None:
    """Fill in each outcome's setting, or why it has none."""
    for outcome in outcomes:
        arm = outcome.arm
        if arm.family != OWN and (reason := why_missing(arm.family)):
            outcome.reason = reason
            say(f"{arm.name}: {reason}")
            continue
        if quick:
            outcome.setting = next(iter(arm.settings))
            continue
        outcome.tuned = tune(make, arm, prompts.tuning, limits, say)
        outcome.setting = outcome.tuned.best
        if outcome.setting is None:
            outcome.reason = next(iter(outcome.tuned.failures.values()), "no setting")


def _figures(
    facts: dict[str, Any], limits: Limits, rows: Sequence[Row], outcomes: Sequence[Outcome], prompts: Prompts
) -> dict[str, Any]:
    """Everything that was seen, for a file."""
    return {
        "machine": facts,
        "limits": dataclasses.asdict(limits),
        "rows": [dataclasses.asdict(row) for row in rows],
        "arms": [_arm_figures(outcome) for outcome in outcomes],
        "prompts": [
            {"question_id": prompt.question_id, "category": prompt.category, "num_tokens": len(prompt.token_ids)}
            for prompt in prompts.measured
        ],
    }


def _arm_figures(outcome: Outcome) -> dict[str, Any]:
    arm: Arm = outcome.arm
    return {
        "name": arm.name,
        "family": arm.family,
        "versions": dict(outcome.versions),
        "setting": outcome.setting,
        "what_it_means": dict(arm.settings[outcome.setting]) if outcome.setting else None,
        "tuning": dataclasses.asdict(outcome.tuned) if outcome.tuned else None,
        "reason": outcome.reason,
        "answers": {question: dataclasses.asdict(result) for question, result in outcome.results.items()},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--prompts", type=_positive, default=4, metavar="N", help="of each category (default: 4)")
    parser.add_argument("--max-tokens", type=_positive, default=128, metavar="N", help="longest answer (default: 128)")
    parser.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME",
        help=f"only arms whose names begin so, and the baseline; may be repeated. {'; '.join(a.name for a in ARMS)}",
    )
    parser.add_argument("--category", action="append", default=[], help="only this category; may be repeated")
    parser.add_argument("--cores", type=_cores, metavar="0,1", help="cores for everything (default: the first two)")
    parser.add_argument("--threads", type=int, choices=THREADS, help="tune with so many alone (default: with both)")
    parser.add_argument("--no-tuning", action="store_true", help="each arm's first setting, to try things out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, and all answers, to this file")
    return parser.parse_args()


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise ValueError
    return number


def _cores(word: str) -> list[int]:
    return sorted({int(part) for part in word.split(",")})


if __name__ == "__main__":
    sys.exit(main())
