"""JSON lines to a real child process, and what becomes of one that hangs, breaks or ends."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.peers.arms import Arm
from benchmarks.peers.child import ChildPeer
from benchmarks.peers.peer import Model, NotOffered, PeerFailed, Prompt, Result, Setting
from benchmarks.peers.run import Limits, Outcome, measure, tune

_PROMPT = Prompt(question_id="1", category="qa", text="abc", token_ids=(7, 8, 9))
_LIBRARY = """
    import os, sys, time
    from benchmarks.peers.child_protocol import Clock, serve

    class Library:
        def start(self, setting):
            print("loading")  # libraries do: it must not be taken for an answer
            assert setting["threads"] == 1, "one thread only"
            return {"versions": {"fake": "1.0"}}

        def generate(self, prompt, max_tokens):
            clock = Clock()
            if max_tokens == 66:
                time.sleep(60)
            if max_tokens == 67:
                raise RuntimeError("out of luck")
            if max_tokens == 68:
                sys.stderr.write("last words\\n")
                sys.stderr.flush()
                os._exit(3)
            clock.tokens(1)
            clock.tokens(max_tokens - 1)
            return clock.result([prompt[0]] * max_tokens)

    serve(Library())
"""


@pytest.fixture
def make_child(tmp_path: Path) -> Iterator[Callable[[], ChildPeer]]:
    script = tmp_path / "library.py"
    script.write_text(textwrap.dedent(_LIBRARY))
    # -c: as with -m, the child finds `benchmarks` in the folder it is started in.
    command = [sys.executable, "-c", f"exec(open({str(script)!r}).read())"]
    model = Model(gguf=Path("model.gguf"), folder=Path("model"), end_token_ids=(2,))
    made: list[ChildPeer] = []

    def make() -> ChildPeer:
        made.append(ChildPeer(command, model, lambda token_ids: " ".join(map(str, token_ids))))
        return made[-1]

    yield make
    for peer in made:
        peer.stop()


def _generate(peer: ChildPeer, max_tokens: int, timeout_seconds: float = 30.0) -> Result:
    return peer.generate(_PROMPT, max_tokens=max_tokens, timeout_seconds=timeout_seconds)


def test_a_child_loads_answers_and_stops(make_child: Callable[[], ChildPeer]) -> None:
    peer = make_child()
    peer.start({"threads": 1}, timeout_seconds=30)
    assert peer.versions == {"fake": "1.0"}
    result = _generate(peer, 4)
    assert (result.num_tokens, result.first_num_tokens, result.num_calls, result.text) == (4, 1, 2, "7 7 7 7")
    assert 0.0 <= result.first_token_seconds <= result.total_seconds
    assert _generate(peer, 2).num_tokens == 2
    peer.stop()
    peer.stop()


def test_a_child_that_raises_says_what_and_goes_on(make_child: Callable[[], ChildPeer]) -> None:
    peer = make_child()
    with pytest.raises(PeerFailed, match="one thread only"):
        peer.start({"threads": 2}, timeout_seconds=30)
    peer.stop()
    peer.start({"threads": 1}, timeout_seconds=30)
    with pytest.raises(PeerFailed, match="RuntimeError: out of luck"):
        _generate(peer, 67)
    assert _generate(peer, 1).num_tokens == 1


def test_a_child_that_ends_leaves_its_last_words(make_child: Callable[[], ChildPeer]) -> None:
    peer = make_child()
    peer.start({"threads": 1}, timeout_seconds=30)
    with pytest.raises(PeerFailed, match=r"ended: .*last words"):
        _generate(peer, 68)
    with pytest.raises(PeerFailed, match="ended"):
        _generate(peer, 1)


def test_a_child_that_hangs_is_given_up_in_time_and_stopped(make_child: Callable[[], ChildPeer]) -> None:
    peer = make_child()
    peer.start({"threads": 1}, timeout_seconds=30)
    began = time.monotonic()
    with pytest.raises(PeerFailed, match=r"no answer after 0\.5 s"):
        _generate(peer, 66, timeout_seconds=0.5)
    peer.stop()
    assert time.monotonic() - began < 15


def test_a_program_that_is_not_there_is_a_failed_peer() -> None:
    model = Model(gguf=Path("model.gguf"), folder=Path("model"), end_token_ids=(2,))
    peer = ChildPeer(["/nowhere/python"], model, lambda _: "")
    with pytest.raises(PeerFailed, match="cannot run /nowhere/python"):
        peer.start({"threads": 1}, timeout_seconds=5)
    peer.stop()


class _ScriptedPeer:
    """Answers at the speed its setting names; fails where it says so."""

    settle_seconds = 0.0

    def __init__(self, journal: list[str]) -> None:
        self.versions = {"scripted": "1"}
        self._journal = journal
        self._answers = 0

    def start(self, setting: Setting, *, timeout_seconds: float) -> None:
        self._setting = setting
        self._journal.append(f"start {setting['name']}")
        if setting.get("refuses"):
            raise NotOffered("no such drafter")

    def generate(self, prompt: Prompt, *, max_tokens: int, timeout_seconds: float) -> Result:
        self._answers += 1
        if self._answers > self._setting.get("answers", 99):
            raise PeerFailed("no answer after 1 s")
        self._journal.append(f"{self._setting['name']} {prompt.question_id}")
        return Result(
            num_tokens=max_tokens,
            first_token_seconds=0.1,
            first_num_tokens=1,
            total_seconds=max_tokens / self._setting.get("rate", 1.0),
            text="",
        )

    def stop(self) -> None:
        self._journal.append(f"stop {self._setting['name']}")


def _silent(_: str) -> None:
    pass


def test_tuning_tries_all_settings_stops_each_peer_and_passes_over_the_broken() -> None:
    journal: list[str] = []
    settings: dict[str, Setting] = {
        "slow": {"name": "slow", "rate": 5.0},
        "broken": {"name": "broken", "answers": 1},
        "fast": {"name": "fast", "rate": 9.0},
    }
    arm = Arm(name="x", family="scripted", settings=settings)
    tuned = tune(lambda _: _ScriptedPeer(journal), arm, [_PROMPT], Limits(), _silent)
    assert tuned.best == "fast"
    assert tuned.rates == {"slow": pytest.approx(5.0), "fast": pytest.approx(9.0)}
    assert tuned.failures == {"broken": "no answer after 1 s"}
    assert [line for line in journal if line.startswith("st")] == [
        f"{verb} {name}" for name in settings for verb in ("start", "stop")
    ]


def test_what_a_peer_does_not_offer_is_asked_for_once() -> None:
    journal: list[str] = []
    settings: dict[str, Setting] = {name: {"name": name, "refuses": True} for name in "ab"}
    arm = Arm(name="x", family="scripted", settings=settings)
    tuned = tune(lambda _: _ScriptedPeer(journal), arm, [_PROMPT], Limits(), _silent)
    assert (tuned.best, tuned.failures) == (None, {"a": "no such drafter"})
    assert journal == ["start a", "stop a"]


def test_a_peer_that_fails_in_the_measured_run_is_stopped_and_the_others_go_on() -> None:
    journal: list[str] = []
    outcomes = [
        Outcome(arm=Arm(name=name, family="scripted", settings={"s": {"name": name, **more}}), setting="s")
        for name, more in (("good", {}), ("bad", {"answers": 2}))
    ]
    prompts = [Prompt(question_id=str(i), category="qa", text="", token_ids=(1,)) for i in range(3)]
    measure(lambda _: _ScriptedPeer(journal), outcomes, prompts, [_PROMPT], Limits(), _silent)
    good, bad = outcomes
    assert (list(good.results), good.reason) == (["0", "1", "2"], None)
    assert list(bad.results) == ["0"]
    assert bad.reason == "failed at prompt 2: no answer after 1 s"
    # Turn 0: good, bad. Turn 1: bad (fails, is stopped), good. Turn 2: good.
    assert journal[4:] == ["good 0", "bad 0", "stop bad", "good 1", "good 2", "stop bad", "stop good"]
