"""The graph that OpenVinoRunner computes: a model's own in its paged form, and what is cut and joined in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
from openvino import opset13
from openvino._offline_transformations import paged_attention_transformation

from tandem.engine.openvino_weights import join_multiplications, keep_tokens, weight_constants
from tandem.engine.runner import Int32Array
from tandem.errors import InvalidRequest

ROWS: Final = "tandem_logits_rows"  # the input that names the rows whose logits are wanted
CACHE: Final = re.compile(r"(?P<kind>key|value)_cache\.(?P<layer>\d+)")  # inputs that are the KV cache
_LAYER_OUTPUT = "model.layers.self_attn.add1.layer{}"  # the residual stream after a layer, as GenAI's reader names it
_GGUF_GROUP, _ROW_GROUP = 32, 64


def paged_graph(
    core: ov.Core, model_file: Path, *, num_layers: int | None, token_ids: Int32Array | None
) -> tuple[ov.Model, int]:
    """The graph of an openvino_model.xml with paged attention, and the width of its logits.

    `num_layers` keeps the first layers only; with `token_ids` the head is for these tokens only, and the width is of
    all. Raises InvalidRequest for a model that OpenVINO cannot page, or whose layers cannot be told apart.
    """
    graph = core.read_model(model_file)
    try:
        paged_attention_transformation(graph)
    except RuntimeError as error:
        raise InvalidRequest(
            f"OpenVINO has no paged attention for {model_file} ({error}); choose engine torch", param="engine"
        ) from error
    if num_layers is not None:
        _keep_layers(graph, num_layers)
    head = _gather_before_head(graph)
    width: int = graph.output(0).partial_shape[-1].get_length()
    if token_ids is not None:
        keep_tokens(graph, head, token_ids)
    join_multiplications(graph)
    return graph, width


def cpu_options(*, threads: int, precision: str, group_size: int) -> dict[str, Any]:
    """For a graph that answers one caller at a time. Activations are rounded in groups of `group_size`; 0: not."""
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,  # two services on one machine would be pinned to the same first core
        "INFERENCE_PRECISION_HINT": precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group_size,
    }


def rounding_group(graph: ov.Model) -> int:
    """In groups of how many activations are rounded to 8 bits.

    GGUF's own formats scale weights in groups of 32, stored as [rows, groups, 32], and need no larger groups: with 64
    those take 10 to 20 % longer. Where every row has one scale, 64 takes 5 to 10 % less time than 32 (decision 21).
    """
    in_groups = any(
        len(shape := constant.output(0).shape) == 3 and shape[2] == _GGUF_GROUP
        for node in graph.get_ops()
        if node.get_type_name() == "MatMul"
        for constant in weight_constants(node)
    )
    return _GGUF_GROUP if in_groups else _ROW_GROUP


def _keep_layers(graph: ov.Model, num_layers: int) -> None:
    """Let the final norm follow layer `num_layers`; what nothing needs any more goes, parameters included."""
    caches = [(port, CACHE.fullmatch(name)) for port in graph.inputs for name in port.names]
    layers = {int(found["layer"]) for _, found in caches if found}
    if not 1 <= num_layers <= len(layers):
        raise InvalidRequest(
            f"num_layers must be between 1 and the model's {len(layers)}, got {num_layers}", param="num_layers"
        )
    outputs = {node.get_friendly_name(): node.output(0) for node in graph.get_ops()}
    try:
        last = outputs[_LAYER_OUTPUT.format(len(layers) - 1)]
        kept = outputs[_LAYER_OUTPUT.format(num_layers - 1)]
    except KeyError as error:
        raise InvalidRequest(
            "the layers of this OpenVINO model cannot be told apart; give its .gguf file, or choose engine torch",
            param="num_layers",
        ) from error
    if num_layers < len(layers):
        for reader in last.get_target_inputs():
            reader.replace_source_output(kept)
        for port, found in caches:
            if found and int(found["layer"]) >= num_layers:
                graph.remove_parameter(port.get_node())
    graph.validate_nodes_and_infer_types()


def _gather_before_head(graph: ov.Model) -> ov.Node:
    """A new input names the rows whose logits are wanted; the head, 20 % of a small model, works for these only.

    What it reads, their hidden states, is the graph's second output. Returns the head: the multiplication that makes
    the logits.
    """
    head = graph.get_results()[0].input_value(0).get_node()
    while head.get_type_name() != "MatMul":
        head = head.input_value(0).get_node()
    rows = opset13.parameter([-1], np.int32, name=ROWS)
    rows.output(0).set_names({ROWS})
    gathered = opset13.gather(head.input_value(0), rows.output(0), opset13.constant(0, np.int32))
    head.input(0).replace_source_output(gathered.output(0))
    graph.add_parameters([rows])
    graph.add_results([opset13.result(gathered)])
    graph.validate_nodes_and_infer_types()
    return head
