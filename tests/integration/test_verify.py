"""`tandem verify` against real services on tiny models: it passes on the right build, and fails on a wrong one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.stack import Stack
from tests.tiny_models import write_draft, write_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# The same for every build. 300 samples of two sets find an error of 0.21 in the second token's law.
OPTIONS = ("--samples", "300", "--seeds", "5", "--parameters", "few", "--parameters", "penalties")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose laws are broad, so that few samples say much, and a draft that is often wrong."""
    folder = tmp_path_factory.mktemp("broad")
    target = write_target(folder / "target", sharpness=1.5)
    return target, write_draft(target, folder / "draft", noise=0.5)


@contextmanager
def services(models: tuple[Path, Path], folder: Path, *, broken_rule: str | None = None) -> Iterator[Stack]:
    target, draft = models
    settings = {"TANDEM_DRAFT_LAW_SIZE": "300", "TANDEM_DRAFT_MIN_NGRAM": "1"}
    if broken_rule is not None:
        settings["TANDEM_BROKEN_RULE"] = broken_rule
    stack = Stack(folder=folder, target_model=str(target), draft_model=str(draft), settings=settings)
    if broken_rule is not None:
        stack.target.module = "tests.broken_target"
    with stack:
        yield stack


@pytest.fixture(scope="module")
def right(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The right build."""
    with services(models, tmp_path_factory.mktemp("right")) as stack:
        yield stack


def verify(stack: Stack, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The command's end, and its JSON."""
    file = stack.folder / "verify.json"
    done = subprocess.run(
        [sys.executable, "-m", "tandem.cli", "verify", "--url", stack.url, "--json", str(file), *options],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    document: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return done, document


def failed(document: dict[str, Any], kind: str, name: str) -> set[str]:
    return {line[name] for line in document[kind] if line["verdict"] == "failed"}


def test_the_right_build_passes_and_every_line_was_tested(right: Stack) -> None:
    done, document = verify(right, *OPTIONS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Speculation does not change what is said" in done.stdout
    assert document["passed"]
    assert (document["num_failed"], document["num_untested"], document["samples_per_arm"]) == (0, 0, 300)
    assert {line["drafter"] for line in document["laws"]} == {"model", "ngram"}
    assert all(0 < line["accepted"] < line["drafted"] for line in document["laws"])
    assert all(0.0 < line["visible"] < 0.4 for line in document["laws"])
    assert {(line["rule"], line["num_draft_tokens"]) for line in document["texts"]} == {
        (rule, k) for rule in ("coupled", "greedy") for k in (1, 3, 5, 8)
    }


def test_services_without_a_draft_are_not_declared_right(right: Stack) -> None:
    """Plain decoding is equal to itself; that is no test of speculation. The last test of this stack: its draft is
    gone."""
    right.draft.kill()
    right.wait_until("degraded")
    done, document = verify(right, "--samples", "20", "--seeds", "1", "--parameters", "few", "--drafter", "model")
    assert done.returncode == 1
    assert document["num_failed"] == 0
    assert {line["remark"] for line in document["laws"]} == {"nothing was drafted"}


@pytest.mark.parametrize("broken_rule", ["whole-law", "twice"])
def test_a_wrong_rejection_rule_fails(models: tuple[Path, Path], tmp_path: Path, broken_rule: str) -> None:
    """The negative control: the same options as above. What does not use the rule goes on passing."""
    with services(models, tmp_path, broken_rule=broken_rule) as stack:
        done, document = verify(stack, *OPTIONS)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Speculation CHANGES what is said" in done.stdout
    assert not document["passed"]
    assert "token 2" in failed(document, "laws", "law")
    assert "token 1" not in failed(document, "laws", "law")
    assert not failed(document, "texts", "rule")


def test_a_wrong_coupled_rule_fails(models: tuple[Path, Path], tmp_path: Path) -> None:
    with services(models, tmp_path, broken_rule="coupled") as stack:
        done, document = verify(
            stack, "--samples", "20", "--seeds", "12", "--drafter", "ngram", "--parameters", "few", "--allow-untested"
        )
    assert done.returncode == 1, done.stdout + done.stderr
    assert failed(document, "texts", "rule") == {"coupled"}
    assert not failed(document, "laws", "law")
    assert "without speculation" in done.stdout


def test_wrong_words_are_answered_in_one_line(tmp_path: Path) -> None:
    stack_less = [sys.executable, "-m", "tandem.cli", "verify", "--url", "http://127.0.0.1:9"]
    for options, words in (((), "no gateway answers"), (("--parameters", "few-er"), "there are few, nucleus")):
        done = subprocess.run([*stack_less, *options], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
