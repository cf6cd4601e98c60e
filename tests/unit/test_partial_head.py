"""A head for some tokens gives the logits that the whole head gives for them, and -inf for the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.engine.factory import start_runner
from tandem.engine.openvino_runner import EXACT, OpenVinoRunner
from tandem.engine.static_decode import as_it_is
from tandem.engine.torch_runner import TorchRunner
from tandem.errors import InvalidRequest
from tandem.models.draft_vocabulary import FILE, beside, draft_vocabulary, vocabulary_file
from tandem.models.gguf_export import export_gguf
from tandem.models.loading import load_model
from tandem.models.locate import ModelFiles, locate
from tandem.models.openvino_files import openvino_model
from tandem.settings import EngineSettings
from tests.tiny_models import logits_of, write_target

KEPT = np.array([0, 3, 17, 18, 65, 101, 200, 256, 259], dtype=np.int32)
MERGES = [("t", "h"), ("th", "e")]  # GGUF's readers want some
VOCAB = 262


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("partial") / "tiny", merges=MERGES)


def check(whole: torch.Tensor, partial: torch.Tensor, *, atol: float) -> None:
    kept = torch.from_numpy(KEPT.astype(np.int64))
    assert partial.shape == whole.shape == (3, VOCAB)
    torch.testing.assert_close(partial[:, kept], whole[:, kept], atol=atol, rtol=0.0)
    others = torch.ones(VOCAB, dtype=torch.bool)
    others[kept] = False
    assert bool((partial[:, others] == -torch.inf).all())


def test_of_the_torch_runner(folder: Path) -> None:
    def runner(token_ids: np.ndarray | None) -> TorchRunner:
        loaded = load_model(ModelFiles(folder=folder, model_id="tiny", revision=""), device="cpu", dtype="float32")
        return TorchRunner(loaded.model, vocab_size=VOCAB, block_size=16, num_blocks=4, token_ids=token_ids)

    check(logits_of(runner(None)), logits_of(runner(KEPT)), atol=1e-5)


def test_of_recorded_steps(folder: Path) -> None:
    """What is recorded before the head is cut must not be used afterwards."""
    loaded = load_model(ModelFiles(folder=folder, model_id="tiny", revision=""), device="cpu", dtype="float32")

    runner = TorchRunner(loaded.model, vocab_size=VOCAB, block_size=16, num_blocks=4, capture=as_it_is, token_ids=KEPT)
    kept = torch.from_numpy(KEPT.astype(np.int64))
    logits = logits_of(runner)
    assert bool(logits[:, kept].isfinite().all())
    assert int(logits.isfinite().sum()) == 3 * len(KEPT)


@pytest.mark.parametrize("quantization", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_of_the_openvino_runner(folder: Path, quantization: str) -> None:
    path = folder.parent / f"{quantization}.gguf"
    export_gguf(folder, path, quantization=quantization)
    model = openvino_model(locate(str(path), cache_dir=folder.parent / "cache", progress=print), print)

    def runner(token_ids: np.ndarray | None) -> OpenVinoRunner:
        return OpenVinoRunner(
            model,
            most_token_ids=VOCAB,
            context_length=128,
            kv_cache_bytes=1 << 22,
            threads=1,
            precision=EXACT,
            token_ids=token_ids,
        )

    check(logits_of(runner(None)), logits_of(runner(KEPT)), atol=1e-4)


def test_the_list_in_the_folder_is_for_drafts_only(folder: Path, tmp_path: Path) -> None:
    draft = write_target(tmp_path / "draft", merges=MERGES)
    (draft / FILE).write_bytes(vocabulary_file(KEPT.astype(np.int64)))
    files = locate(str(draft), cache_dir=tmp_path, progress=print)
    settings = EngineSettings(dtype="float32", kv_cache_bytes=1 << 22)
    with pytest.raises(InvalidRequest, match="draft whose head knows 9 tokens"):
        start_runner(files, settings, progress=print)
    whole = start_runner(locate(str(folder), cache_dir=tmp_path, progress=print), settings, progress=print)
    partial = start_runner(files, settings, is_draft=True, progress=print)
    check(logits_of(whole.runner), logits_of(partial.runner), atol=1e-5)


def test_a_gguf_file_s_list_goes_by_its_own_name(tmp_path: Path) -> None:
    files = ModelFiles(folder=tmp_path, model_id="draft", revision="", gguf=tmp_path / "draft.gguf")
    assert draft_vocabulary(files, vocab_size=VOCAB) is None
    beside(tmp_path / "another.gguf").write_bytes(vocabulary_file(KEPT.astype(np.int64)))
    assert draft_vocabulary(files, vocab_size=VOCAB) is None
    beside(tmp_path / "draft.gguf").write_bytes(vocabulary_file(KEPT.astype(np.int64)))
    found = draft_vocabulary(files, vocab_size=VOCAB)
    assert found is not None
    np.testing.assert_array_equal(found, KEPT)


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        ([], "at least one"),
        ([3, 3], "ascending"),
        ([4, 2], "ascending"),
        ([-1, 2], "ascending"),
        ([[1, 2]], "ascending"),
        ([0, VOCAB], "names token 262, but the model's last is 261"),
    ],
)
def test_lists_that_cannot_be_are_refused(tmp_path: Path, ids: list[int], complaint: str) -> None:
    (tmp_path / FILE).write_bytes(vocabulary_file(np.array(ids, dtype=np.int64)))
    with pytest.raises(InvalidRequest, match=complaint):
        draft_vocabulary(ModelFiles(folder=tmp_path, model_id="draft", revision=""), vocab_size=VOCAB)


def test_damaged_lists_are_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no JSON")
    with pytest.raises(InvalidRequest, match="cannot read"):
        draft_vocabulary(ModelFiles(folder=tmp_path, model_id="draft", revision=""), vocab_size=VOCAB)
