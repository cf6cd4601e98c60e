"""A gateway without a draft service: it drafts itself, from the text and a table, and the text is plain decoding's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from tandem.distill.ngrams import learn
from tandem.models.tokenizer_files import tokenizer_fingerprint
from tandem.ngram_table import Origin
from tests.stack import Stack
from tests.toy_tables import example

PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"


def _table(target_folder: Path, file: Path) -> Path:
    with safe_open(target_folder / "model.safetensors", framework="numpy") as opened:
        vocab_size = opened.get_tensor("model.embed_tokens.weight").shape[0]
    origin = Origin(
        model_id="toy",
        tokenizer_fingerprint=tokenizer_fingerprint(target_folder),
        vocab_size=vocab_size,
        num_answer_tokens=9,
    )
    learn([example([65, 66], [67, 68, 69])], origin=origin).save(file)
    return file


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("alone")
    settings = {"TANDEM_GATEWAY_TABLE": str(_table(target_folder, folder / "table.safetensors"))}
    with Stack(folder=folder, target_model=str(target_folder), num_drafts=0, settings=settings) as running:
        yield running


def test_it_is_ready_and_has_its_own_drafters(alone: Stack) -> None:
    assert alone.client.get(f"{alone.url}/health/ready").json() == {"status": "ready", "reasons": []}
    refused = alone.client.post(
        f"{alone.url}/v1/completions", json={"prompt": "x", "speculation": {"drafter": "model"}}
    )
    assert refused.status_code == 400
    assert "must be one of auto, ngram, table" in refused.json()["error"]["message"]


@pytest.mark.parametrize("drafter", ["auto", "ngram", "table"])
@pytest.mark.parametrize("law", [{"temperature": 0}, {"temperature": 1, "seed": 3}])
def test_the_text_is_plain_decoding_s(alone: Stack, drafter: str, law: dict[str, float]) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "return_token_ids": True, **law}
    plain = alone.complete(**asked, speculation={"enabled": False})
    spoken = alone.complete(**asked, speculation={"drafter": drafter})
    assert spoken["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    report = spoken["speculation"]
    assert report["bytes_sent"] == 4 * report["drafted"]  # ids only: to the target, and from nobody
    if drafter != "table" and law["temperature"] == 0:
        assert 0 < report["accepted"] <= report["drafted"]


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path, target_folder: Path) -> None:
    (tmp_path / "bad").write_bytes(b"no table")
    stack = Stack(
        folder=tmp_path,
        target_model=str(target_folder),
        num_drafts=0,
        settings={"TANDEM_GATEWAY_TABLE": str(tmp_path / "bad")},
    )
    stack.gateway.start()
    assert stack.gateway.process is not None
    assert stack.gateway.process.wait(30) != 0
    assert "cannot be read as a table" in (tmp_path / "gateway.log").read_text()
