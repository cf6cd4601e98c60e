"""The table of n-grams that comes with Tandem, made from the bundled target's answers; and others, by their path."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tandem.errors import InvalidRequest
from tandem.ngram_table import NgramTable
from tandem.types import ModelInfo

BUNDLED_TABLE: Final = Path(__file__).with_name("bundled_ngrams.safetensors")
_UNBOUNDED: Final = (1 << 32) - 1  # tokens: a table has no context of its own


def find_table(source: str, *, target_model: str) -> NgramTable | None:
    """`bundled`, a file's path, `none`, or `auto`: the bundled one for the bundled target. Raises InvalidRequest."""
    if source == "auto":
        source = "bundled" if target_model == "bundled" else "none"
    if source == "none":
        return None
    path = BUNDLED_TABLE if source == "bundled" else Path(source).expanduser()
    if not path.is_file():
        raise InvalidRequest(f"there is no {path}; `tandem distill` makes a table of n-grams", param="table")
    return NgramTable.load(path)


def table_info(table: NgramTable) -> ModelInfo:
    """A table as the gateway is told of it: it goes with the tokenizer of the target that it was made for."""
    return ModelInfo(
        model_id=f"n-grams of {table.origin.model_id}",
        revision="",
        vocab_size=table.origin.vocab_size,
        tokenizer_fingerprint=table.origin.tokenizer_fingerprint,
        context_length=_UNBOUNDED,
        device="cpu",
        dtype="",
        engine="table",
    )
