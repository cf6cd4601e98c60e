"""A draft head compiled for CPUs: weights of 8 bits, as the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import openvino as ov
import torch
from openvino import opset13

from tandem.draft_head import RMS_EPSILON, DraftHeadWeights, RoundedMatrix
from tandem.draft_law import SparseLaw
from tandem.engine.draft_head import LARGEST_LAW, as_laws
from tandem.engine.openvino_graph import cpu_options

_ROUNDING_GROUP: Final = 64  # numbers that are rounded to 8 bits together, as in the target's own steps


class OpenVinoDraftHead:
    """A DraftHead (see tandem/engine/draft_head.py), on `threads` of the CPU."""

    def __init__(self, weights: DraftHeadWeights, *, threads: int) -> None:
        self._weights = weights
        options = cpu_options(threads=threads, precision="f32", group_size=_ROUNDING_GROUP)
        self._request = ov.Core().compile_model(_graph(weights), "CPU", options).create_infer_request()

    def laws(self, states: torch.Tensor, token_ids: Sequence[int]) -> list[SparseLaw]:
        places = self._weights.places(np.asarray(token_ids, dtype=np.int64))
        self._request.infer({"states": states.numpy(), "places": places.astype(np.int32)}, share_inputs=True)
        likeliest: npt.NDArray[np.int32] = self._request.get_output_tensor(0).data
        probs: npt.NDArray[np.float32] = self._request.get_output_tensor(1).data
        return as_laws(self._weights.token_ids, likeliest, probs)


def _graph(weights: DraftHeadWeights) -> ov.Model:
    """The formula in tandem/draft_head.py, and the likeliest tokens' places [n, m] and probabilities [n, m]."""
    states = opset13.parameter([-1, weights.state_width], np.float32, name="states")
    places = opset13.parameter([-1], np.int32, name="places")
    states.output(0).set_names({"states"})
    places.output(0).set_names({"places"})
    tokens = opset13.constant(weights.tokens.dense())  # a gather of few rows: nothing is gained by 8 bits
    token = opset13.gather(tokens, places, _axis(0))
    hidden = opset13.add(_times(_rms(states), weights.from_state), _times(token, weights.from_token))
    seen = opset13.concat([_rms(hidden), token], -1)
    gated = opset13.multiply(opset13.swish(_times(seen, weights.gate)), _times(seen, weights.up))
    hidden = opset13.add(hidden, _times(gated, weights.down))
    law = opset13.softmax(_times(_rms(hidden), weights.out), axis=-1)
    most = opset13.constant(min(LARGEST_LAW, len(weights.token_ids)), np.int32)
    top = opset13.topk(law, most, -1, "max", "value")
    return ov.Model(
        [opset13.result(top.output(1)), opset13.result(top.output(0))], [states, places], "tandem draft head"
    )


def _times(values: Any, matrix: RoundedMatrix) -> ov.Node:
    """values [n, columns] times the matrix, whose rows are restored in the multiplication itself."""
    rounded = opset13.convert(opset13.constant(matrix.values), np.float32)
    scaled = opset13.multiply(rounded, opset13.constant(matrix.scales[:, None]))
    return opset13.matmul(values, scaled, transpose_a=False, transpose_b=True)


def _rms(values: Any) -> ov.Node:
    mean = opset13.reduce_mean(opset13.multiply(values, values), _axis(-1), keep_dims=True)
    return opset13.divide(values, opset13.sqrt(opset13.add(mean, opset13.constant(RMS_EPSILON, np.float32))))


def _axis(axis: int) -> ov.Node:
    return opset13.constant(axis, np.int32)
