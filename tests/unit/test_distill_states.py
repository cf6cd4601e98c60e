"""The target's states along its answers: those of the model itself, in the work folder, after interruptions too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tandem.distill.dataset import Example
from tandem.distill.states import RECORD, STATES, States
from tandem.engine.runner import RaggedBatch
from tandem.engine.torch_runner import TorchRunner
from tandem.errors import InvalidRequest, Unavailable
from tandem.models.loading import load_model
from tandem.models.locate import ModelFiles
from tests.distill_examples import VOCAB, example, random_examples
from tests.tiny_models import write_target

SHARDS = (Path("shard-00000.safetensors"),)


class RecordingRunner(TorchRunner):
    """Keeps what it was asked."""

    batches: list[RaggedBatch]

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        self.batches = [*getattr(self, "batches", ()), batch]
        return super().forward(batch)


@pytest.fixture(scope="module")
def target_files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = write_target(tmp_path_factory.mktemp("states") / "target", attention=0.5)
    return ModelFiles(folder=folder, model_id="tiny", revision="")


def new_runner(files: ModelFiles, *, num_blocks: int = 400) -> RecordingRunner:
    model = load_model(files, device="cpu", dtype="float32").model
    runner = RecordingRunner(model, vocab_size=VOCAB, block_size=8, num_blocks=num_blocks)
    runner.batches = []  # without what its constructor tried
    return runner


def compute(states: States, runner: TorchRunner, stop: Callable[[], bool] = lambda: False) -> list[int]:
    """What `advance` was told: rows done, after each step."""
    told: list[int] = []
    states.compute(runner, advance=lambda done, rate: told.append(done), stop=stop)
    return told


def many_examples() -> list[Example]:
    """A few thousand tokens, several batches; one alone is longer than a batch."""
    rng = np.random.default_rng(3)
    return [*random_examples(60), example(rng.integers(0, 250, 1100).tolist(), 900), *random_examples(40, seed=1)]


def of_the_model(files: ModelFiles, examples: Sequence[Example]) -> np.ndarray[Any, np.dtype[np.float32]]:
    model: Any = load_model(files, device="cpu", dtype="float32").model
    rows = []
    with torch.no_grad():
        for one in examples:
            found = model(input_ids=torch.from_numpy(one.token_ids)[None].long(), output_hidden_states=True)
            rows.append(found.hidden_states[-1][0, one.prompt_length - 1 : -1])
            # They are what the head reads.
            torch.testing.assert_close(model.lm_head(rows[-1]), found.logits[0, one.prompt_length - 1 : -1])
    array: np.ndarray[Any, np.dtype[np.float32]] = torch.cat(rows).numpy()
    return array


def test_they_are_the_model_s_own_at_the_token_before_each(target_files: ModelFiles, tmp_path: Path) -> None:
    examples, runner = many_examples(), new_runner(target_files)
    states = States(tmp_path, SHARDS, examples)
    assert states.num_done == 0
    told = compute(states, runner)
    assert told == sorted(told)
    assert told[-1] == states.num_done == states.num_rows == sum(len(one.top_ids) for one in examples)
    kept = states.read()
    assert kept.dtype == np.float16
    np.testing.assert_allclose(kept, of_the_model(target_files, examples), rtol=2e-3, atol=2e-3)

    # Several answers in each batch, within its bounds.
    assert max(len(batch.logits_rows) for batch in runner.batches) <= 512
    assert sum(batch.num_tokens > 1024 for batch in runner.batches) == 1
    assert 4 <= len(runner.batches) <= 12


class Interrupted(NamedTuple):
    told: list[int]
    forwards: int


def test_a_run_that_was_ended_goes_on(target_files: ModelFiles, tmp_path: Path) -> None:
    examples = many_examples()
    whole = States(tmp_path / "whole", SHARDS, examples)
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    one_go = new_runner(target_files)
    compute(whole, one_go)

    runs: list[Interrupted] = []
    while not runs or runs[-1].told[-1] < whole.num_rows:
        runner = new_runner(target_files)
        states = States(tmp_path / "parts", SHARDS, examples)
        told = compute(states, runner, stop=lambda runner=runner: len(runner.batches) == 2)  # type: ignore[misc]
        assert states.num_done == told[-1]
        runs.append(Interrupted(told, len(runner.batches)))
    assert len(runs) > 2
    assert sum(run.forwards for run in runs) <= len(one_go.batches) + len(runs)
    np.testing.assert_allclose(States(tmp_path / "parts", SHARDS, examples).read(), whole.read(), rtol=2e-3, atol=2e-3)
    assert compute(States(tmp_path / "parts", SHARDS, examples), one_go) == []


def test_other_answers_states_are_made_anew(target_files: ModelFiles, tmp_path: Path) -> None:
    runner = new_runner(target_files)
    examples = random_examples(20)
    compute(States(tmp_path, SHARDS, examples), runner)
    more = States(tmp_path, [*SHARDS, Path("shard-00001.safetensors")], [*examples, *random_examples(5, seed=1)])
    assert more.num_done == 0
    compute(more, runner)
    assert len(more.read()) == more.num_rows
    # A shard of the same name with other answers.
    others = States(tmp_path, SHARDS, random_examples(20, seed=2))
    assert others.num_done == 0
    assert States(tmp_path, SHARDS, examples).num_done == 0


@pytest.mark.parametrize("damage", ["record", "states", "neither"])
def test_what_is_damaged_is_made_anew(target_files: ModelFiles, tmp_path: Path, damage: str) -> None:
    examples = random_examples(20)
    states = States(tmp_path, SHARDS, examples)
    compute(states, new_runner(target_files))
    expected = np.array(states.read())
    if damage == "record":
        (tmp_path / RECORD).write_text("{")
    elif damage == "states":
        (tmp_path / STATES).write_bytes(b"broken")
    assert states.num_done == (states.num_rows if damage == "neither" else 0)
    compute(states, new_runner(target_files))
    np.testing.assert_array_equal(states.read(), expected)


def test_rows_after_an_error_are_kept_as_far_as_they_are_whole(target_files: ModelFiles, tmp_path: Path) -> None:
    states, runner = States(tmp_path, SHARDS, many_examples()), new_runner(target_files)

    def fail(done: int, rate: float) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        states.compute(runner, advance=fail, stop=lambda: False)
    assert 0 < states.num_done < states.num_rows
    assert json.loads((tmp_path / RECORD).read_bytes())["done"] == states.num_done


def test_what_cannot_be_done_is_refused_before(
    target_files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = States(tmp_path, SHARDS, [example(list(range(60)), 30)])
    with pytest.raises(InvalidRequest, match=r"holds 32 tokens.*prompt 60.*--kv-cache-gib"):
        compute(states, new_runner(target_files, num_blocks=4))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(Unavailable, match=r"make room, or .*--head-tokens"):
        compute(states, new_runner(target_files))
    assert not (tmp_path / STATES).exists()
