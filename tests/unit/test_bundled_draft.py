"""The bundled draft: layers taken out of a draft, and put together again with the target's embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.distill.student import new_student
from tandem.engine import factory
from tandem.engine.factory import find_model, start_runner
from tandem.engine.runner import ModelRunner
from tandem.errors import InvalidRequest
from tandem.models.bundled_draft import extract_layers, put_together
from tandem.models.draft_vocabulary import beside, read_vocabulary, vocabulary_file
from tandem.models.gguf_export import export_gguf
from tandem.models.loading import load_model
from tandem.models.locate import ModelFiles, locate
from tandem.settings import EngineSettings
from tests.tiny_models import byte_tokenizer, logits_of, write_target

MERGES = [("t", "h"), ("th", "e")]
KEPT = np.array([0, 3, 17, 101, 256, 261])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target.gguf` (Q4_1, its embeddings too), `draft.gguf` of two of its layers, and `layers.gguf`."""
    folder = tmp_path_factory.mktemp("bundled")
    write_target(folder / "target", layers=4, merges=MERGES)
    export_gguf(folder / "target", folder / "target.gguf", quantization="Q8_0")
    target = load_model(ModelFiles(folder=folder / "target", model_id="t", revision=""), device="cpu", dtype="float32")
    new_student(target.model, (0, 3), device=torch.device("cpu")).save_pretrained(folder / "draft")
    byte_tokenizer(merges=MERGES).save_pretrained(folder / "draft")
    export_gguf(folder / "draft", folder / "draft.gguf", quantization="Q8_0")
    beside(folder / "draft.gguf").write_bytes(vocabulary_file(KEPT))
    extract_layers(folder / "draft.gguf", folder / "target.gguf", folder / "layers.gguf")
    return folder


def logits_of_file(path: Path, cache_dir: Path) -> torch.Tensor:
    runner: ModelRunner = start_runner(
        locate(str(path), cache_dir=cache_dir, progress=print),
        EngineSettings(dtype="float32", kv_cache_bytes=1 << 22, device="cpu"),
        is_draft=True,
        progress=print,
    ).runner
    return logits_of(runner)


def test_what_is_put_together_is_the_draft(place: Path, tmp_path: Path) -> None:
    said: list[str] = []
    path = put_together(place / "layers.gguf", place / "target.gguf", tmp_path, said.append)
    assert "done once" in said[0]
    found = read_vocabulary(beside(path))
    assert found is not None
    np.testing.assert_array_equal(found, KEPT)
    torch.testing.assert_close(
        logits_of_file(path, tmp_path), logits_of_file(place / "draft.gguf", tmp_path), atol=0, rtol=0
    )
    assert put_together(place / "layers.gguf", place / "target.gguf", tmp_path, said.append) == path
    assert len(said) == 1


def test_the_layers_are_without_the_embeddings(place: Path) -> None:
    whole, layers = (place / "draft.gguf").stat().st_size, (place / "layers.gguf").stat().st_size
    embeddings = 2 * 262 * 64  # and a head, of a byte a weight at least
    assert layers < whole - embeddings


def test_layers_of_another_target_are_refused(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes((place / "target.gguf").read_bytes() + b"\0")
    with pytest.raises(InvalidRequest, match="belongs to another target"):
        put_together(place / "layers.gguf", other, tmp_path, print)
    assert not list(tmp_path.glob("*.draft-*"))


def test_a_draft_without_a_vocabulary_is_not_taken_apart(place: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no target_vocabulary\.json beside"):
        extract_layers(place / "target.gguf", place / "target.gguf", tmp_path / "layers.gguf")


def test_the_name_bundled_draft_leads_to_it(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.setattr(factory, "bundled_layers", lambda: place / "layers.gguf")
    monkeypatch.setattr(factory, "fetch_bundled", lambda _cache_dir, _progress: place / "target.gguf")
    files = find_model("bundled-draft", print)
    assert files.gguf is not None
    assert files.gguf.parent == tmp_path / "drafts"
    assert files.model_id.startswith("target.draft-")
