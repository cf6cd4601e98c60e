"""The tokens that a draft can say, where they are not all: a list of ids beside its weights.

A small draft spends most of its time in the head, on tokens that hardly ever come. Leaving them out is exact, since any
draft law is (tandem/engine/rejection.py); the idea is FR-Spec's (Zhao et al. 2025). The list is the file
`draft_vocabulary.safetensors` in the model's folder, or `<name>_vocabulary.safetensors` beside `<name>.gguf`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from tandem.errors import InvalidRequest
from tandem.models.locate import ModelFiles

FILE: Final = "draft_vocabulary.safetensors"
_TENSOR: Final = "token_ids"

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
        ids: npt.NDArray[np.generic] = load_file(path)[_TENSOR]
    except (OSError, KeyError, SafetensorError) as error:
        raise InvalidRequest(f"cannot read {path}: {error!r}; copy it again with the model", param="model") from error
    integers = ids.astype(np.int64) if ids.ndim == 1 and ids.dtype.kind in "iu" else np.empty(0, dtype=np.int64)
    if not len(integers) or integers[0] < 0 or bool((np.diff(integers) <= 0).any()):
        raise InvalidRequest(f"{path} must hold {_TENSOR}: ascending ids, at least one", param="model")
    return integers.astype(np.int32)


def vocabulary_file(token_ids: npt.NDArray[np.int64]) -> bytes:
    """The content of such a file."""
    return save({_TENSOR: token_ids.astype(np.int32)})


def beside(gguf: Path) -> Path:
    """Where the list of a GGUF file's draft is."""
    return gguf.with_name(f"{gguf.stem}_vocabulary.safetensors")
