"""`tandem distill` from a target to a draft that serves, on a tiny target, and after being killed at each stage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.distill.states import RECORD, STATES
from tandem.distill.work_folder import WorkFolder
from tandem.draft_head import DraftHeadWeights
from tandem.engine.factory import start_runner
from tandem.engine.runner import ModelRunner, RaggedBatch
from tandem.models.draft_vocabulary import FILE, read_vocabulary
from tandem.models.locate import locate
from tandem.models.tokenizer_files import tokenizer_fingerprint
from tandem.settings import EngineSettings
from tests.tiny_models import write_target

MERGES = [("t", "h"), ("th", "e")]
VOCAB = 262
KEPT = 150
OPTIONS = ("--tokens", "8000", "--batch-size", "24", "--layers", "2", "--vocab", str(KEPT), "--epochs", "3")
MORE = ("--batch-tokens", "1024", "--evaluations", "6", "--patience", "6", "--threads", "1", "--device", "cpu")
HEAD = ("--head-inner", "64", "--head-vocab", "100", "--head-epochs", "2")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("distill") / "target", merges=MERGES, sharpness=3.0, attention=0.5)


def command(target: Path, work: Path, *more: str) -> list[str]:
    place = ("--model", str(target), "--work", str(work))
    return [sys.executable, "-m", "tandem.cli", "distill", *place, *OPTIONS, *MORE, *HEAD, *more]


def run(target: Path, work: Path, *more: str) -> str:
    done = subprocess.run(command(target, work, *more), capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def end_when(there: Callable[[], bool], process: subprocess.Popen[str], how: signal.Signals) -> int:
    """Send the signal as soon as `there`; the exit code."""
    try:
        deadline = time.monotonic() + 90
        while not there():
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(how)
        return process.wait(timeout=30)
    finally:
        process.kill()
        process.wait()


def logits_of(runner: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    """Of the last of a few tokens."""
    count = len(token_ids)
    return runner.forward(
        RaggedBatch(
            token_ids=np.array(token_ids, dtype=np.int32),
            position_ids=np.arange(count, dtype=np.int32),
            past_lens=np.zeros(1, dtype=np.int32),
            sequence_starts=np.array([0, count], dtype=np.int32),
            decode_starts=np.array([count], dtype=np.int32),
            block_table=np.zeros(1, dtype=np.int32),
            block_starts=np.array([0, 1], dtype=np.int32),
            logits_rows=np.array([count - 1], dtype=np.int32),
        )
    ).clone()


@pytest.mark.slow
def test_from_a_target_to_a_draft_that_both_engines_serve(target: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    said = run(target, work)
    draft = work / "draft"
    assert f"the draft is in {draft}" in said
    assert tokenizer_fingerprint(draft) == tokenizer_fingerprint(target)
    config = json.loads((draft / "config.json").read_bytes())
    assert config["num_hidden_layers"] == 2
    kept = read_vocabulary(draft / FILE)
    assert kept is not None
    assert len(kept) == KEPT
    assert "| all |" in (draft / "README.md").read_text()

    settings = EngineSettings(dtype="float32", kv_cache_bytes=1 << 22, device="cpu")
    by_engine = {
        engine: start_runner(
            locate(str(source), cache_dir=tmp_path / "cache", progress=print),
            settings.model_copy(update={"engine": engine}),
            is_draft=True,
            progress=print,
        ).runner
        for engine, source in (("torch", draft), ("openvino", draft / "draft.gguf"))
    }
    text = [80, 260, 101, 5, 17]
    from_torch, from_openvino = (logits_of(runner, text) for runner in by_engine.values())
    others = np.setdiff1d(np.arange(VOCAB), kept)
    assert bool((from_torch[0, others] == -torch.inf).all())
    # The GGUF file's weights are of 8 bits.
    distance = (from_torch.softmax(-1) - from_openvino.softmax(-1)).abs().sum() / 2
    assert float(distance) < 0.05

    # Everything is there: nothing is done twice.
    again = run(target, work)
    assert "are in" in again
    assert "already" in again


@pytest.mark.slow
def test_what_was_done_before_a_kill_is_not_done_again(target: Path, tmp_path: Path) -> None:
    work, folder = tmp_path / "work", WorkFolder(tmp_path / "work")
    # While the target answers: killed outright, and asked to end.
    answering = command(target, work, "--tokens", "40000")
    process = subprocess.Popen(answering, stderr=subprocess.DEVNULL, text=True)
    assert end_when(lambda: len(folder.shards) >= 1, process, signal.SIGKILL) == -signal.SIGKILL
    first = [one.asked.key for one in folder.said()]
    assert first
    process = subprocess.Popen(answering, stderr=subprocess.DEVNULL, text=True)
    assert end_when(lambda: len(folder.shards) >= 2, process, signal.SIGTERM) == 3
    second = [one.asked.key for one in folder.said()]
    assert second[: len(first)] == first
    assert len(set(second)) == len(second)

    # While it trains.
    process = subprocess.Popen(command(target, work), stderr=subprocess.DEVNULL, text=True)
    end_when(lambda: bool(list(work.glob("training-*/checkpoint.pt"))), process, signal.SIGKILL)
    said = run(target, work)
    assert "going on at step" in said
    assert (work / "draft" / "model.safetensors").is_file()
    keys = [one.asked.key for one in folder.said()]
    assert len(set(keys)) == len(keys)
    assert not list(work.glob(".*partial"))


@pytest.mark.slow
def test_a_draft_head_without_a_draft(target: Path, tmp_path: Path) -> None:
    work, file = tmp_path / "work", tmp_path / "head.safetensors"
    said = run(target, work, "--tokens", "3000", "--until", "head", "--head", str(file))
    assert f"the draft head is in {file}" in said
    assert f"--draft-head {file}" in said
    assert not (work / "draft").exists()
    head = DraftHeadWeights.load(file)
    assert head.origin.tokenizer_fingerprint == tokenizer_fingerprint(target)
    assert (head.state_width, len(head.token_ids), head.gate.shape[0]) == (64, 100, 64)

    # All of it is there; then more answers, and the states of all of them.
    content, states = file.read_bytes(), np.load(work / STATES, mmap_mode="r").shape
    again = run(target, work, "--tokens", "3000", "--until", "head", "--head", str(file))
    assert f"the draft head is in {file}" in again
    assert "reads its answers again" not in again
    assert file.read_bytes() == content
    run(target, work, "--tokens", "12000", "--until", "head")
    assert (work / "head.safetensors").is_file()
    more = np.load(work / STATES, mmap_mode="r").shape
    assert more[0] > states[0]
    assert json.loads((work / RECORD).read_bytes())["done"] == more[0]


@pytest.mark.slow
def test_another_target_s_work_folder_is_refused(target: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    run(target, work, "--tokens", "300", "--until", "answers")
    other = write_target(tmp_path / "other", seed=5)
    done = subprocess.run(command(other, work), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "holds answers of other work: its model is 'target'" in done.stderr


@pytest.mark.slow
def test_a_user_s_own_prompts_alone(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "own.jsonl"
    lines = [{"prompt": f"Say {number} words."} for number in range(30)]
    prompts.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"turns": ["One.", "Two."]}\n')
    work = tmp_path / "work"
    run(target, work, "--prompts", str(prompts), "--only-own-prompts", "--until", "answers", "--tokens", "5000")
    said = list(WorkFolder(work).said())
    texts = {str(one.asked.messages[-1]["content"]) for one in said}
    assert texts <= {line["prompt"] for line in lines} | {"One.", "Two."}
    assert "Two." in texts
    second = next(one for one in said if one.asked.messages[-1]["content"] == "Two.")
    assert [message["role"] for message in second.asked.messages] == ["user", "assistant", "user"]
    assert {one.asked.validation for one in said} == {True, False}


def test_bad_options_are_named(target: Path, tmp_path: Path) -> None:
    def error(*arguments: str) -> str:
        full = [sys.executable, "-m", "tandem.cli", "distill", *arguments]
        done = subprocess.run(
            full, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "COLUMNS": "200"}
        )
        assert done.returncode != 0
        return done.stderr

    assert "--only-own-prompts goes with --prompts" in error("--only-own-prompts")
    assert "--from-layers must be numbers" in error("--from-layers", "0,x")
    assert "there is no" in error("--model", str(tmp_path / "nothing"), "--work", str(tmp_path / "work"))
