"""The tokens that a draft can say, where they are not all: a list of ids beside its weights.

A small draft spends most of its time in the head, on tokens that hardly ever come. Leaving them out is exact, since any
draft law is (tandem/engine/rejection.py); the idea is FR-Spec's (Zhao et al. 2025). The list is the file
`draft_vocabulary.json` in the model's folder, or `<name>_vocabulary.json` beside `<name>.gguf`.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tandem.errors import InvalidRequest
from tandem.models.locate import ModelFiles

FILE: Final = "draft_vocabulary.json"
_FIELD: Final = "token_ids"

TokenIds = npt.NDArray[np.int32]


def draft_vocabulary(files: ModelFiles, *, vocab_size: int) -> TokenIds | None:
    """The ids [V], ascending, that the model's head is for; None where it is for all. Raises InvalidRequest."""
    path = files.folder / FILE if files.gguf is None else beside(files.gguf)
    token_ids = read_vocabulary(path)
    if token_ids is not None and token_ids[-1] >= vocab_size:
        raise InvalidRequest(
            f"{path} names token {token_ids[-1]}, but the model's last is {vocab_size - 1}", param="model"
        )
    return token_ids


def read_vocabulary(path: Path) -> TokenIds | None:
    """The ids in a file; None where there is none. Raises InvalidRequest for a file that is something else."""
    if not path.is_file():
        return None
    try:
        ids = json.loads(path.read_bytes())[_FIELD]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"cannot read {path}: {error!r}; copy it again with the model", param="model") from error
    if (
        not isinstance(ids, list)
        or not ids
        or not all(isinstance(i, int) and 0 <= i < 2**31 for i in ids)
        or any(later <= earlier for earlier, later in pairwise(ids))
    ):
        raise InvalidRequest(f"{path} must hold {_FIELD}: ascending ids, at least one", param="model")
    return np.array(ids, dtype=np.int32)


def vocabulary_file(token_ids: npt.NDArray[np.int64]) -> bytes:
    """The content of such a file."""
    return json.dumps({_FIELD: token_ids.tolist()}).encode()


def beside(gguf: Path) -> Path:
    """Where the list of a GGUF file's draft is."""
    return gguf.with_name(f"{gguf.stem}_vocabulary.json")
