"""The OpenVINO form of a model: `openvino_model.xml` and `.bin` in the model's folder.

A folder exported for OpenVINO has them already; for a model that came as a GGUF file they are written once, by OpenVINO
GenAI's own reader. It rounds the minimum of a block to a whole number of steps, so weights stored with a minimum
(Q4_1, Q4_K) come out wrong by 10 % of their size: of SmolLM2-135M's next-token laws a third of the mass moves. Such a
file is therefore first turned into 8 bits without a minimum, which are wrong by 0.6 %.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor

from tandem.errors import InvalidRequest, Unavailable
from tandem.models.bundled import exclusive
from tandem.models.locate import ModelFiles, Progress

MODEL = "openvino_model.xml"
_WEIGHTS = "openvino_model.bin"
_EXPORT_TIMEOUT_SECONDS = 1800.0
_F32, _F16, _Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0
# Matrices that GenAI's reader takes over as they are.
_FAITHFUL = frozenset({_F16, _Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q6_K})
_MOSTLY_Q8_0 = 7  # the code of general.file_type


def has_openvino_form(files: ModelFiles) -> bool:
    """Whether `openvino_model` would find, or could make, what it returns."""
    return files.gguf is not None or (files.folder / MODEL).is_file()


def openvino_model(files: ModelFiles, progress: Progress) -> Path:
    """The path of the model's openvino_model.xml, made now if need be.

    Raises InvalidRequest for a model that has no such form, Unavailable where it cannot be written.
    """
    xml = files.folder / MODEL
    if xml.is_file():
        return xml
    if files.gguf is None:
        raise InvalidRequest(
            f"{files.model_id} is no OpenVINO model: give a .gguf file or a folder with {MODEL} (optimum-cli export "
            "openvino writes one), or choose engine torch",
            param="engine",
        )
    try:
        lock = files.folder / ".openvino.lock"
        with exclusive(lock, timeout_seconds=_EXPORT_TIMEOUT_SECONDS, progress=progress):
            if not xml.is_file():
                progress(f"writing the OpenVINO form of {files.gguf.name}; this is done once")
                _export(files.gguf, files.folder)
    except OSError as error:
        raise Unavailable(
            f"cannot write the OpenVINO form of {files.gguf.name} into {files.folder}: {error}; make room, or set "
            "TANDEM_CACHE"
        ) from error
    return xml


def _export(file: Path, folder: Path) -> None:
    import openvino_genai  # half a second, and needed once in a model's life

    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=folder) as temporary:
        # It writes beside the file it reads.
        readable = Path(temporary) / file.name
        try:
            reader = GGUFReader(file)
            if all(_stored_as(tensor) is tensor.tensor_type for tensor in reader.tensors):
                readable.symlink_to(file)
            else:
                _rewrite(reader, readable)
            openvino_genai.LLMPipeline(str(readable), "CPU", enable_save_ov_model=True, INFERENCE_NUM_THREADS=1)
        except (RuntimeError, ValueError, LookupError, NotImplementedError) as error:
            raise InvalidRequest(
                f"OpenVINO cannot read {file.name} ({error}); choose engine torch, or give the model as Q8_0",
                param="engine",
            ) from error
        # The .xml last: where it is, the other is complete.
        (Path(temporary) / _WEIGHTS).rename(folder / _WEIGHTS)
        (Path(temporary) / MODEL).rename(folder / MODEL)


def _stored_as(tensor: ReaderTensor) -> GGMLQuantizationType:
    """The nearest format that GenAI's reader gets right. Q8_0 is blocks of 32 signed bytes and one scale."""
    kind = tensor.tensor_type
    if kind in _FAITHFUL or (kind is _F32 and len(tensor.shape) == 1):
        return kind
    return _F16 if kind in (_F32, GGMLQuantizationType.BF16) else _Q8_0


def _rewrite(reader: GGUFReader, destination: Path) -> None:
    """The same model with every tensor `_stored_as` GenAI's reader gets it right."""
    writer = GGUFWriter(destination, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue  # the writer's own
        kind = field.types[0]
        value = _MOSTLY_Q8_0 if field.name == "general.file_type" else field.contents()
        writer.add_key_value(field.name, value, kind, sub_type=field.types[-1] if kind is GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        data, stored_as = tensor.data, _stored_as(tensor)
        if stored_as is not tensor.tensor_type:
            data = gguf.quantize(gguf.dequantize(data, tensor.tensor_type), stored_as)
        writer.add_tensor(tensor.name, data, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
