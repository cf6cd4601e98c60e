"""OpenVinoRunner: a ModelRunner for CPUs, on OpenVINO's paged-attention form of a model.

OpenVINO turns the stateful graph of an exported model into one whose attention reads and writes a paged cache that the
caller owns, over packed tokens: our RaggedBatch, nearly word for word. What is ours is the memory of that cache, and
cuts in the graph: logits only for the rows asked for, and, on request, after the first layers, or of some tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
import torch

from tandem.engine.continuations import filled_up, in_blocks, one_by_one
from tandem.engine.openvino_graph import CACHE, ROWS, cpu_options, paged_graph, rounding_group
from tandem.engine.openvino_steps import CompiledSteps, affordable_sizes, of_size
from tandem.engine.partial_head import spread
from tandem.engine.runner import Int32Array, RaggedBatch
from tandem.errors import InvalidRequest

_BLOCK_SIZE = 32  # tokens; fixed in OpenVINO's CPU plug-in
_STORED_AS: dict[str, type[np.generic]] = {"f32": np.float32, "bf16": np.uint16, "f16": np.uint16, "u8": np.uint8}

_AnyArray = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVinoPrecision:
    """Numbers the model computes in, beside its weights, which stay as the file has them.

    A cache of 8 bits is not offered: OpenVINO scales its keys by block and channel, so what a block holds would depend
    on which guesses had been in it before, and speculation would no longer give plain decoding's text.
    """

    inference: str  # f32 or bf16
    kv_cache: str  # f32, bf16 or f16
    rounds_activations: bool  # to 8 bits, in groups

    @property
    def dtype(self) -> str:
        """The name that services report."""
        return "bfloat16" if self.inference == "bf16" else "float32"


EXACT = OpenVinoPrecision(inference="f32", kv_cache="f32", rounds_activations=False)
_FAST_FLOAT32 = OpenVinoPrecision(inference="f32", kv_cache="f16", rounds_activations=True)
_FAST_BFLOAT16 = OpenVinoPrecision(inference="bf16", kv_cache="bf16", rounds_activations=True)


def choose_precision(dtype: str, cpu_capabilities: Mapping[str, object]) -> OpenVinoPrecision:
    """The fastest precision that a CPU with `torch.cpu.get_capabilities()` has, for "auto", or the one asked for.

    "float32" rounds nothing: it is for proofs, and 2 to 3 times as slow for blocks of tokens. Raises InvalidRequest.
    """
    has_bfloat16 = bool(cpu_capabilities.get("avx512_bf16") or cpu_capabilities.get("amx_bf16"))
    match dtype:
        case "auto":
            return _FAST_BFLOAT16 if has_bfloat16 else _FAST_FLOAT32
        case "float32":
            return EXACT
        case "bfloat16" if has_bfloat16:
            return _FAST_BFLOAT16
        case _:
            raise InvalidRequest(
                f"dtype {dtype} is not there with engine openvino on this CPU; choose auto, float32 or engine torch",
                param="dtype",
            )


class OpenVinoRunner:
    """A ModelRunner (see tandem/engine/runner.py) around `model_file`, an openvino_model.xml with a stateful graph.

    `most_token_ids` is the tokenizer's vocabulary; logits of padding beyond it are cut off. `num_layers` keeps the
    first layers only. With `token_ids` the head is for these tokens only, and the others' logits are -inf.
    `kv_cache_bytes` bounds the cache, `fixed_step_bytes` what copies of the weights take that are compiled for steps of
    one size each (openvino_steps.py). Raises InvalidRequest for a graph that OpenVINO cannot page, and where the cache
    would hold less than three blocks.

    A text comes out the same to the bit whether its tokens were computed one by one, in verify blocks, or beside
    others': see continuations.py; `attends_in_blocks` says which of its two ways is taken. And float32 matrices
    multiply a single row by another kernel than several, so there a lone token gets a companion that nobody asks about,
    in a block set aside for it.
    """

    def __init__(
        self,
        model_file: Path,
        *,
        most_token_ids: int,
        context_length: int,
        kv_cache_bytes: int,
        threads: int,
        precision: OpenVinoPrecision,
        fixed_step_bytes: int = 0,
        num_layers: int | None = None,
        attends_in_blocks: bool = False,
        token_ids: Int32Array | None = None,
    ) -> None:
        core = ov.Core()
        graph, width = paged_graph(core, model_file, num_layers=num_layers, token_ids=token_ids)
        self._token_ids = None if token_ids is None else torch.from_numpy(token_ids.astype(np.int64))
        options = {
            **cpu_options(
                threads=threads,
                precision=precision.inference,
                group_size=rounding_group(graph) if precision.rounds_activations else 0,
            ),
            "KV_CACHE_PRECISION": precision.kv_cache,
            # It fuses element-wise operations where sizes are fixed only, and then rounds them less often: other bits.
            "SNIPPETS_MODE": "DISABLE",
        }
        self._attends_in_blocks = attends_in_blocks
        self._last_step_size = self._last_num_rows = 0
        self._needs_company = not precision.rounds_activations
        self._least_size = 2 if self._needs_company or attends_in_blocks else 1
        compiled = core.compile_model(graph, "CPU", options)
        caches = {name: port for port in compiled.inputs for name in port.names if CACHE.fullmatch(name)}
        shapes = {name: _block_shape(port) for name, port in caches.items()}
        types = {name: port.element_type for name, port in caches.items()}
        bytes_per_block = sum(math.prod(shapes[name]) * types[name].size for name in caches)
        allocated: int = kv_cache_bytes // bytes_per_block
        self._num_blocks = allocated - 1  # the last one is for companions
        if self._num_blocks < 2:
            raise InvalidRequest(
                f"kv_cache_bytes must hold at least three blocks of {bytes_per_block} bytes, got {kv_cache_bytes}",
                param="kv_cache_bytes",
            )
        # Caches of one shape and type share a storage, so that copying blocks is one operation.
        self._storages = _allocate(shapes, types, allocated)
        with _taken_from_the_system(self._storages):
            self._steps = CompiledSteps(
                compiled,
                lambda size: core.compile_model(of_size(graph, size), "CPU", options),
                affordable_sizes(
                    least_size=self._least_size,
                    weights_bytes=model_file.with_suffix(".bin").stat().st_size,
                    most_bytes=fixed_step_bytes,
                ),
            )
        for names, storage in self._storages:
            for name, array in zip(names, storage, strict=True):
                self._steps.keep(name, ov.Tensor(array, ov.Shape(array.shape), types[name]))
        self._vocab_size = min(most_token_ids, width)
        self._context_length = min(context_length, self._num_blocks * _BLOCK_SIZE)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def context_length(self) -> int:
        """The model's own, or what the cache holds where that is less."""
        return self._context_length

    @property
    def block_size(self) -> int:
        return _BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Logits [R, vocab_size], float32, on the CPU; memory that the next call writes anew. See ModelRunner."""
        fed = in_blocks(batch, spare_block=self._num_blocks) if self._attends_in_blocks else one_by_one(batch)
        rows = fed.logits_rows
        size = self._last_step_size = self._steps.fit(max(fed.num_tokens, self._least_size))
        fed = filled_up(fed, size, spare_block=self._num_blocks)
        if self._needs_company and len(rows) == 1:
            rows = rows.repeat(2)
        inputs: dict[str, npt.NDArray[np.int32]] = {
            "input_ids": fed.token_ids,
            "position_ids": fed.position_ids,
            "past_lens": fed.past_lens,
            "subsequence_begins": fed.sequence_starts,
            "block_indices": fed.block_table,
            "block_indices_begins": fed.block_starts,
            "max_context_len": (fed.past_lens + np.diff(fed.sequence_starts)).max(),
            ROWS: rows,
        }
        logits = self._steps.infer(inputs, num_tokens=size)
        self._last_num_rows = len(batch.logits_rows)
        wanted = torch.from_numpy(logits.reshape(len(rows), logits.shape[-1])[: len(batch.logits_rows)])
        if self._token_ids is not None:
            return spread(wanted, self._token_ids, vocab_size=self._vocab_size)
        return wanted[:, : self._vocab_size]

    def step_size(self, num_sequences: int, *, tokens_each: int) -> int:
        """See continuations.py."""
        if self._attends_in_blocks:
            tokens_each = max(2, tokens_each)
        return self._steps.usual(max(num_sequences * tokens_each, self._least_size))

    @property
    def last_step_size(self) -> int:
        return self._last_step_size

    @property
    def last_states(self) -> torch.Tensor:
        states = self._steps.last_states
        return torch.from_numpy(states.reshape(-1, states.shape[-1])[: self._last_num_rows])

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole blocks of all layers, pair by pair: a destination may be the source of a later pair."""
        for _, storage in self._storages:
            for source, destination in zip(sources, destinations, strict=True):
                storage[:, destination] = storage[:, source]


def _block_shape(port: ov.Output) -> tuple[int, ...]:
    """Shape of one block of a cache, as the compiled model wants it."""
    return tuple(dimension.get_length() for dimension in list(port.partial_shape)[1:])


def _allocate(
    shapes: dict[str, tuple[int, ...]], types: dict[str, ov.Type], num_blocks: int
) -> list[tuple[list[str], _AnyArray]]:
    """Names of the caches of one block shape and type, and their storage [names, num_blocks, *block shape]."""
    groups: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault((shape, types[name].get_type_name()), []).append(name)
    return [
        (names, np.empty((len(names), num_blocks, *shape), dtype=_STORED_AS[type_name]))
        for (shape, type_name), names in groups.items()
    ]


@contextmanager
def _taken_from_the_system(storages: Sequence[tuple[list[str], _AnyArray]]) -> Iterator[None]:
    """Write to all of that memory, beside what else is done meanwhile.

    The system gives memory when it is first written to, which made the first prefills of a service a fifth slower (256
    tokens: 72 ms, 60 once their blocks had been used). And where there is not enough, a start fails, not an answer.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-cache") as pool:
        filling = [pool.submit(storage.fill, 0) for _, storage in storages]
        yield
        for done in filling:
            done.result()
