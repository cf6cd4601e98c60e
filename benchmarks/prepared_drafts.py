"""What preparing drafts gains: how long the loop waits for a draft, with and without, prompt by prompt in turn.

    python -m benchmarks.prepared_drafts [--draft-layers 4 | --draft-model bundled] [--branches 6] [--k 4]

Starts the target and two draft services with the same model, which differ in TANDEM_DRAFT_PREPARED_BRANCHES alone (0,
and `--branches`), and runs the gateway's own loop over gRPC here, one answer at a time: each prompt with one draft,
then with the other, in alternating order. The draft that is not asked does nothing, so two cores will do.

The table has, by draft: the median wait for a draft, the share of drafts that were ready, tokens a second, and tokens
per target call, which both have in common; then the ratios, paired by prompt, with 95 % intervals. With the target as
its own draft (the default is its first four layers) nearly everything is accepted, which is the most that preparing can
gain.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.peers.process import Process, free_ports
from gateway.draft_length import FixedLength
from gateway.fleet import Fleet
from gateway.grpc_backends import Deadlines
from gateway.speculate import SpeculationPlan, speculate
from tandem.bench.statistics import Ratio, median_ratio
from tandem.bench.workload import own_workload
from tandem.types import SamplingParams, SessionStart, Verification

_DEADLINES = Deadlines(
    request_seconds=300,
    first_seconds=60,
    verify_seconds=60,
    draft_first_seconds=60,
    draft_seconds=60,
    draft_retry_seconds=1,
)
_START_SECONDS = 180.0
_ARMS = ("without", "with")


@dataclass(slots=True)
class Answers:
    """What one draft's answers cost; one entry a prompt."""

    waits: list[float] = field(default_factory=list)  # median seconds for a draft
    rates: list[float] = field(default_factory=list)  # tokens a second
    num_drafts: int = 0
    num_ready: int = 0
    num_tokens: int = 0
    num_rounds: int = 0


async def main(options: argparse.Namespace) -> None:
    ports = free_ports(6)
    with ExitStack() as stack:
        processes = [_start(stack, "target_service", "TARGET", ports[:2], TANDEM_TARGET_MODEL=options.model)]
        layers = {} if options.draft_model else {"TANDEM_DRAFT_NUM_LAYERS": str(options.draft_layers)}
        for own_ports, branches in ((ports[2:4], 0), (ports[4:6], options.branches)):
            settings = {
                "TANDEM_DRAFT_MODEL": options.draft_model or options.model,
                "TANDEM_DRAFT_PREPARED_BRANCHES": str(branches),
                **layers,
            }
            processes.append(_start(stack, "draft_service", "DRAFT", own_ports, **settings))
        fleets = {
            arm: Fleet(
                targets=[f"127.0.0.1:{ports[0]}"],
                drafts=[f"127.0.0.1:{port}"],
                deadlines=_DEADLINES,
                probe_interval_seconds=2.0,
                probe_timeout_seconds=10.0,
                failover_seconds=10.0,
                observe_failover=lambda _: None,
                observe_draft_fault=lambda _: None,
            )
            for arm, port in zip(_ARMS, (ports[2], ports[4]), strict=True)
        }
        try:
            for fleet in fleets.values():
                await fleet.start()
            await _until_ready(list(fleets.values()), processes)
            answers = await _measure(fleets, options)
        finally:
            for fleet in fleets.values():
                await fleet.close()
    _print(answers, options)


def _start(stack: ExitStack, module: str, prefix: str, ports: list[int], **settings: str) -> Process:
    process = Process(
        [sys.executable, "-P", "-m", module],
        environment={
            "OMP_NUM_THREADS": "1",
            f"TANDEM_{prefix}_PORT": str(ports[0]),
            f"TANDEM_{prefix}_METRICS_PORT": str(ports[1]),
            **settings,
        },
    )
    stack.callback(process.end)
    return process


async def _until_ready(fleets: list[Fleet], processes: list[Process]) -> None:
    end = time.monotonic() + _START_SECONDS
    while any(fleet.readiness().status != "ready" for fleet in fleets):
        for process in processes:
            if not process.running:
                raise SystemExit(f"a service has ended: {process.last_words()}")
        if time.monotonic() > end:
            raise SystemExit(f"not ready after {_START_SECONDS:g} s: {[fleet.readiness() for fleet in fleets]}")
        await asyncio.sleep(0.2)


async def _measure(fleets: dict[str, Fleet], options: argparse.Namespace) -> dict[str, Answers]:
    answers = {arm: Answers() for arm in _ARMS}
    prompts = own_workload().prompts[: options.prompts]
    for arm in _ARMS:  # once for nothing: caches, connections
        await _answer(fleets[arm], prompts[0].turns[0], 0, options, Answers())
    for number, prompt in enumerate(prompts):
        for arm in _ARMS if number % 2 else reversed(_ARMS):
            await _answer(fleets[arm], prompt.turns[0], number, options, answers[arm])
    return answers


async def _answer(fleet: Fleet, text: str, seed: int, options: argparse.Namespace, answers: Answers) -> None:
    served = fleet.served()
    rendered = served.tokenizer.render_chat([{"role": "user", "content": text}], add_generation_prompt=True)
    token_ids = served.tokenizer.encode(rendered, add_special_tokens=False)
    start = SessionStart(
        token_ids=token_ids,
        prompt_length=len(token_ids),
        sampling=SamplingParams(temperature=options.temperature),
        seed=seed,
        verification=Verification[options.verification.upper()],
    )
    waits: list[float] = []
    num_tokens, began = 0, 0.0
    rounds = speculate(
        start,
        max_length=len(token_ids) + options.max_tokens,
        plan=SpeculationPlan(num_draft_tokens=options.k, drafter=options.drafter),
        length=FixedLength(options.k),
        target=fleet.target,
        drafts=fleet.drafts,
    )
    async with aclosing(rounds):
        async for one in rounds:
            if not began:  # the first is the prefill's
                began = time.perf_counter()
                continue
            num_tokens += len(one.token_ids)
            answers.num_rounds += 1
            if one.num_drafted:
                waits.append(one.draft_seconds)
                answers.num_drafts += 1
                answers.num_ready += one.prepared
    answers.rates.append(num_tokens / (time.perf_counter() - began))
    answers.waits.append(float(np.median(waits)))
    answers.num_tokens += num_tokens


def _print(answers: dict[str, Answers], options: argparse.Namespace) -> None:
    console = Console()
    draft = options.draft_model or f"the first {options.draft_layers} layers of {options.model}"
    console.print(f"target {options.model}, draft {draft}, k = {options.k}, {options.branches} branches")
    table = Table("prepared", "wait for a draft, ms", "ready", "tokens/s", "tokens per target call")
    for arm, one in answers.items():
        table.add_row(
            arm,
            f"{1000 * float(np.median(one.waits)):.2f}",
            f"{one.num_ready / max(1, one.num_drafts):.0%}",
            f"{float(np.median(one.rates)):.1f}",
            f"{one.num_tokens / max(1, one.num_rounds):.2f}",
        )
    console.print(table)
    for name, attribute in (("wait", "waits"), ("tokens/s", "rates")):
        pairs = zip(getattr(answers["with"], attribute), getattr(answers["without"], attribute), strict=True)
        console.print(f"{name}, with over without: {_say(median_ratio([one / other for one, other in pairs]))}")


def _say(ratio: Ratio | None) -> str:
    if ratio is None:
        return "nothing to compare"
    interval = "" if ratio.low is None or ratio.high is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.estimate:.2f}{interval} of {ratio.count} prompts"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="bundled", help="the target")
    parser.add_argument("--draft-model", help="default: the target's own first layers")
    parser.add_argument("--draft-layers", type=int, default=4)
    parser.add_argument("--drafter", default="", help="default: the draft service's (auto)")
    parser.add_argument("--branches", type=int, default=6)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--verification", choices=["rejection", "coupled"], default="rejection")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(_options()))
