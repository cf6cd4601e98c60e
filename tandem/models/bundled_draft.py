"""The draft that comes with Tandem: its layers are in this package, its embeddings are the bundled target's.

`layers.gguf` holds the draft's layers and last norm, the ids that its head is for, and the SHA-256 of the target's GGUF
file that it was trained for. Set-up puts it together with that file's embeddings and tokenizer, once, into a GGUF file
in the cache, which is served like any other.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderField, ReaderTensor

from tandem.errors import InternalError, InvalidRequest, Unavailable
from tandem.models.bundled import Progress, exclusive
from tandem.models.draft_vocabulary import beside, read_vocabulary, vocabulary_file

_TARGET: Final = "tandem.draft.target_sha256"
_TOKEN_IDS: Final = "tandem.draft.token_ids"
_OF_TARGET: Final = ("token_embd.weight", "output.weight")  # tensors that the draft shares
_Q8_0: Final = 7  # the code of general.file_type
_TIMEOUT_SECONDS: Final = 600.0


def put_together(layers: Path, target: Path, folder: Path, progress: Progress) -> Path:
    """The GGUF file of the draft with these layers, in `folder`, written on the first call.

    Raises InvalidRequest where `target` is not the file that the layers were trained for, Unavailable where the draft
    cannot be written.
    """
    digest = _sha256(layers)
    path = folder / f"{target.stem}.draft-{digest[:12]}.gguf"
    if path.is_file():
        return path
    reader = GGUFReader(layers)
    expected = _value(reader, _TARGET, layers)
    if expected != _sha256(target):
        raise InvalidRequest(
            f"{layers.name} belongs to another target: a GGUF file with the SHA-256 {expected}, which {target} is not",
            param="draft_model",
        )
    token_ids = np.asarray(_value(reader, _TOKEN_IDS, layers), dtype=np.int64)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock")
        with exclusive(lock, timeout_seconds=_TIMEOUT_SECONDS, progress=progress):
            if not path.is_file():
                progress(f"putting the draft {path.name} together; this is done once")
                with tempfile.TemporaryDirectory(prefix=".draft-", dir=folder) as temporary:
                    whole = Path(temporary) / path.name
                    _write_whole(reader, GGUFReader(target), whole)
                    # The draft last: where it is, its vocabulary is too.
                    vocabulary = Path(temporary) / "vocabulary"
                    vocabulary.write_bytes(vocabulary_file(token_ids))
                    vocabulary.replace(beside(path))
                    whole.replace(path)
    except OSError as error:
        raise Unavailable(f"cannot write the draft to {folder}: {error}; make room or set TANDEM_CACHE") from error
    return path


def extract_layers(draft: Path, target: Path, destination: Path) -> None:
    """Write what `put_together` needs of a draft's GGUF file, beside which its vocabulary is.

    `target` is the GGUF file of the target it was trained for. Raises InvalidRequest for a draft that knows all tokens.
    """
    reader = GGUFReader(draft)
    token_ids = read_vocabulary(beside(draft))
    if token_ids is None:
        raise InvalidRequest(f"there is no {beside(draft).name} beside {draft}", param="draft_model")
    writer = GGUFWriter(destination, _architecture(reader))
    _copy(_fields(reader, lambda name: not name.startswith(("tokenizer.", "general."))), writer)
    writer.add_string(_TARGET, _sha256(target))
    writer.add_array(_TOKEN_IDS, token_ids.tolist())
    _finish(writer, [tensor for tensor in reader.tensors if tensor.name not in _OF_TARGET])


def _write_whole(layers: GGUFReader, target: GGUFReader, destination: Path) -> None:
    architecture = _architecture(target)
    count = f"{architecture}.block_count"
    writer = GGUFWriter(destination, architecture)
    _copy(_fields(target, lambda name: name not in (count, "general.file_type")), writer)
    _copy(_fields(layers, lambda name: name == count), writer)
    writer.add_file_type(_Q8_0)
    _finish(writer, [*(t for t in target.tensors if t.name in _OF_TARGET), *layers.tensors])


def _architecture(reader: GGUFReader) -> str:
    return str(reader.fields["general.architecture"].contents())


def _fields(reader: GGUFReader, wanted: Callable[[str], bool]) -> Iterable[ReaderField]:
    """Those to copy; the writer writes the architecture and its own."""
    return (
        field
        for field in reader.fields.values()
        if field.name != "general.architecture" and not field.name.startswith("GGUF.") and wanted(field.name)
    )


def _copy(fields: Iterable[ReaderField], writer: GGUFWriter) -> None:
    for field in fields:
        kind = field.types[0]
        item = field.types[-1] if kind is GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=item)


def _finish(writer: GGUFWriter, tensors: Iterable[ReaderTensor]) -> None:
    for tensor in tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _value(reader: GGUFReader, name: str, file: Path) -> object:
    if name not in reader.fields:
        raise InternalError(f"{file} lacks {name}: it was not written by Tandem")
    return reader.fields[name].contents()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
