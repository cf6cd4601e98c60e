"""The OpenVINO form of a model: `openvino_model.xml` and `.bin` in the model's folder.

A folder exported for OpenVINO has them already; for a model that came as a GGUF file they are written once, by OpenVINO
GenAI's own reader. It rounds the minimum of a block of weights to a whole number of steps, so weights stored with a
minimum (Q4_1, Q4_K) come out wrong by 10 % of their size: of SmolLM2-135M's next-token laws a third of the mass moves.
A file that has such weights is therefore read in 16 bits, and its matrices, the head's too, are then stored in 8 bits
with a scale for each row; that moves 0.04 of the mass, and the perplexity by 0.3 % (docs/decisions/, 6 and 21).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import openvino as ov
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor
from openvino import opset13

from tandem.errors import InvalidRequest, Unavailable
from tandem.models.bundled import exclusive
from tandem.models.locate import ModelFiles, Progress

MODEL = "openvino_model.xml"
_WEIGHTS = "openvino_model.bin"
_FORM_FILE = "openvino_model.form"  # beside what was made of a GGUF file: by which version of this module
_FORM = "2"  # 1: the head in groups, as GenAI's reader has it
_EXPORT_TIMEOUT_SECONDS = 1800.0
_F32, _F16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16
# Matrices that GenAI's reader takes over as they are.
_FAITHFUL = frozenset({_F16, *(GGMLQuantizationType[name] for name in ("Q4_0", "Q6_K", "Q8_0"))})
_FLOATS = frozenset({_F32, _F16, GGMLQuantizationType.BF16})
_MOSTLY_F16 = 1  # the code of general.file_type
_SMALLEST_SCALE = 1e-12  # of a row of zeros


def has_openvino_form(files: ModelFiles) -> bool:
    """Whether `openvino_model` would find, or could make, what it returns."""
    return files.gguf is not None or (files.folder / MODEL).is_file()


def openvino_model(files: ModelFiles, progress: Progress) -> Path:
    """The path of the model's openvino_model.xml, made now if need be.

    Raises InvalidRequest for a model that has no such form, Unavailable where it cannot be written.
    """
    xml = files.folder / MODEL
    if files.gguf is None:
        if xml.is_file():
            return xml
        raise InvalidRequest(
            f"{files.model_id} is no OpenVINO model: give a .gguf file or a folder with {MODEL} (optimum-cli export "
            "openvino writes one), or choose engine torch",
            param="engine",
        )
    form = files.folder / _FORM_FILE
    if _is_current(form):
        return xml
    try:
        lock = files.folder / ".openvino.lock"
        with exclusive(lock, timeout_seconds=_EXPORT_TIMEOUT_SECONDS, progress=progress):
            if not _is_current(form):
                progress(f"writing the OpenVINO form of {files.gguf.name}; this is done once")
                _export(files.gguf, files.folder)
    except OSError as error:
        raise Unavailable(
            f"cannot write the OpenVINO form of {files.gguf.name} into {files.folder}: {error}; make room, or set "
            "TANDEM_CACHE"
        ) from error
    return xml


def _is_current(form: Path) -> bool:
    return form.is_file() and form.read_text(encoding="ascii") == _FORM


def _export(file: Path, folder: Path) -> None:
    import openvino_genai  # half a second, and needed once in a model's life

    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=folder) as temporary:
        # It writes beside the file it reads.
        readable, exported = Path(temporary) / file.name, Path(temporary) / MODEL
        try:
            reader = GGUFReader(file)
            kinds = {tensor.tensor_type for tensor in reader.tensors}
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
        if not kinds <= _FAITHFUL | _FLOATS:  # 16 bits would be twice what the file has, and slow
            exported = _in_8_bits(exported, Path(temporary) / "int8")
        # The form last: where it is, the others are complete.
        exported.with_suffix(".bin").replace(folder / _WEIGHTS)
        exported.replace(folder / MODEL)
        (folder / _FORM_FILE).write_text(_FORM, encoding="ascii")


def _stored_as(tensor: ReaderTensor) -> GGMLQuantizationType:
    """The format that GenAI's reader gets right: the tensor's own, or 16 bits."""
    kind = tensor.tensor_type
    return kind if kind in _FAITHFUL or (kind is _F32 and len(tensor.shape) == 1) else _F16


def _in_8_bits(model_file: Path, folder: Path) -> Path:
    """The same graph with the matrices of its multiplications as signed bytes and a scale for each row."""
    core = ov.Core()
    graph = core.read_model(model_file)
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "MatMul" or not is_matrix(node.input_value(1)):
            continue
        weights = _numbers(core, node.input_value(1))  # [rows, columns]
        scales = np.maximum(np.abs(weights).max(axis=1, keepdims=True) / 127.0, _SMALLEST_SCALE).astype(np.float32)
        integers = np.rint(weights / scales).astype(np.int8)
        restored = opset13.multiply(opset13.convert(opset13.constant(integers), np.float32), opset13.constant(scales))
        node.input(1).replace_source_output(restored.output(0))
    graph.validate_nodes_and_infer_types()
    folder.mkdir()
    ov.save_model(graph, folder / MODEL, compress_to_fp16=False)
    return folder / MODEL


def is_matrix(source: ov.Output) -> bool:
    """Whether it has two dimensions, both known."""
    return source.partial_shape.is_static and len(source.shape) == 2


def _numbers(core: ov.Core, weights: ov.Output) -> npt.NDArray[np.float32]:
    """Weights as numbers: of 16 bits, or as the head's, which are the embeddings', in groups."""
    stored = weights.get_node().input_value(0).get_node()
    if stored.get_type_name() == "Constant":
        return np.asarray(stored.get_data(), dtype=np.float32)
    model = ov.Model([opset13.convert(weights, np.float32).output(0)], [])
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    numbers: npt.NDArray[np.float32] = compiled([])[0]
    return numbers


def _rewrite(reader: GGUFReader, destination: Path) -> None:
    """The same model with every tensor `_stored_as` GenAI's reader gets it right."""
    writer = GGUFWriter(destination, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue  # the writer's own
        kind = field.types[0]
        value = _MOSTLY_F16 if field.name == "general.file_type" else field.contents()
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
