"""The two phases: each arm's best setting, then all arms prompt by prompt in turn. A peer that fails is left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from benchmarks.peers.arms import Arm
from benchmarks.peers.choices import Tuned, best_setting, extremes, rate_of, rotated
from benchmarks.peers.peer import NotOffered, Peer, PeerFailed, Prompt, Result, Setting

MakePeer = Callable[[str], Peer]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of time, and of length."""

    start_seconds: float = 600.0  # a model may have to be converted or compiled
    answer_seconds: float = 120.0
    warm_up_tokens: int = 16
    tuning_tokens: int = 64
    max_tokens: int = 128


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of an arm. `reason`: why it has no results, or no more."""

    arm: Arm
    tuned: Tuned | None = None
    setting: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)  # by question
    reason: str | None = None


@contextmanager
def started(
    make_peer: MakePeer, arm: Arm, setting: Setting, warm_ups: Sequence[Prompt], limits: Limits
) -> Iterator[Peer]:
    """A running peer that has answered `warm_ups`; stopped at the end, whatever happens."""
    peer = make_peer(arm.family)
    try:
        peer.start(setting, timeout_seconds=limits.start_seconds)
        for prompt in warm_ups:
            peer.generate(prompt, max_tokens=limits.warm_up_tokens, timeout_seconds=limits.answer_seconds)
        yield peer
    finally:
        peer.stop()


def tune(make_peer: MakePeer, arm: Arm, prompts: Sequence[Prompt], limits: Limits, say: Say) -> Tuned:
    """Try every setting of `arm`. What a peer does not offer at all is not asked for a second time."""
    rates: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, setting in arm.settings.items():
        try:
            with started(make_peer, arm, setting, extremes(prompts), limits) as peer:
                results = [
                    peer.generate(prompt, max_tokens=limits.tuning_tokens, timeout_seconds=limits.answer_seconds)
                    for prompt in prompts
                ]
            rates[name] = rate_of(results)
            say(f"{arm.name}, {name}: {rates[name]:.1f} tokens/s")
        except PeerFailed as failure:
            failures[name] = str(failure)
            say(f"{arm.name}, {name}: {failure}")
            if isinstance(failure, NotOffered):
                break
    return best_setting(rates, failures)


def measure(
    make_peer: MakePeer,
    outcomes: Sequence[Outcome],
    prompts: Sequence[Prompt],
    warm_ups: Sequence[Prompt],
    limits: Limits,
    say: Say,
) -> None:
    """Fill the outcomes' results. All peers are loaded at once; one works at a time."""
    with ExitStack() as stack:
        running: dict[str, Peer] = {}
        for outcome in outcomes:
            if outcome.setting is None:
                continue
            setting = outcome.arm.settings[outcome.setting]
            try:
                peer = stack.enter_context(started(make_peer, outcome.arm, setting, warm_ups, limits))
            except PeerFailed as failure:
                outcome.reason = str(failure)
                say(f"{outcome.arm.name}: {failure}")
                continue
            running[outcome.arm.name] = peer
            outcome.versions = dict(peer.versions)
        present = [outcome for outcome in outcomes if outcome.arm.name in running]
        for turn, prompt in enumerate(prompts):
            say(f"prompt {turn + 1} of {len(prompts)}, {prompt.category}")
            for outcome in rotated(present, turn):
                if outcome.arm.name not in running:
                    continue
                peer = running[outcome.arm.name]
                try:
                    outcome.results[prompt.question_id] = peer.generate(
                        prompt, max_tokens=limits.max_tokens, timeout_seconds=limits.answer_seconds
                    )
                    time.sleep(peer.settle_seconds)
                except PeerFailed as failure:
                    outcome.reason = f"failed at prompt {turn + 1}: {failure}"
                    say(f"{outcome.arm.name} {outcome.reason}")
                    running.pop(outcome.arm.name).stop()
