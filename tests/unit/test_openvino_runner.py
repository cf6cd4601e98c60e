"""OpenVinoRunner against TorchRunner on the same GGUF file, and against itself, to the bit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.openvino_graph import paged_graph, rounding_group
from tandem.engine.openvino_runner import EXACT, OpenVinoPrecision, OpenVinoRunner, choose_precision
from tandem.engine.openvino_steps import affordable_sizes
from tandem.engine.runner import ModelRunner, RaggedBatch
from tandem.engine.torch_runner import TorchRunner
from tandem.errors import InvalidRequest
from tandem.models.gguf_export import export_gguf
from tandem.models.loading import load_model
from tandem.models.locate import ModelFiles, locate
from tandem.models.openvino_files import has_openvino_form, openvino_model
from tests.tiny_models import write_target

BLOCK = 32
PROMPT = 2 * BLOCK  # tokens of each text that are prefilled as a prompt
LAYERS = 3
TEXT = np.random.default_rng(1).integers(0, 255, 100).tolist()


pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("hf") / "tiny", layers=LAYERS, merges=[("t", "h"), ("th", "e")])


def gguf_files(hf_folder: Path, quantization: str) -> ModelFiles:
    path = hf_folder.parent / f"tiny.{quantization}.gguf"
    if not path.exists():
        export_gguf(hf_folder, path, quantization=quantization)
    return locate(str(path), cache_dir=hf_folder.parent / "cache", progress=print)


def openvino_runner(
    files: ModelFiles,
    *,
    precision: OpenVinoPrecision = EXACT,
    num_layers: int | None = None,
    kv_cache_bytes: int = 1 << 22,
    most_token_ids: int = 262,
    attends_in_blocks: bool = False,
    fixed_step_bytes: int = 0,
) -> OpenVinoRunner:
    return OpenVinoRunner(
        openvino_model(files, print),
        most_token_ids=most_token_ids,
        context_length=2048,
        kv_cache_bytes=kv_cache_bytes,
        threads=1,
        precision=precision,
        num_layers=num_layers,
        attends_in_blocks=attends_in_blocks,
        fixed_step_bytes=fixed_step_bytes,
    )


def torch_runner(files: ModelFiles, *, num_layers: int | None = None) -> TorchRunner:
    loaded = load_model(files, device="cpu", dtype="float32", num_layers=num_layers)
    return TorchRunner(loaded.model, vocab_size=loaded.vocab_size, block_size=BLOCK, num_blocks=16)


def ragged(
    chunks: Sequence[tuple[Sequence[int], int, Sequence[int]]], rows: Sequence[int] | None = None
) -> RaggedBatch:
    """A batch of chunks (tokens, past, blocks); logits of all rows unless told."""
    lengths = [len(tokens) for tokens, _, _ in chunks]
    positions = [past + i for tokens, past, _ in chunks for i in range(len(tokens))]
    return RaggedBatch(
        token_ids=np.asarray([token for tokens, _, _ in chunks for token in tokens], dtype=np.int32),
        position_ids=np.asarray(positions, dtype=np.int32),
        past_lens=np.asarray([past for _, past, _ in chunks], dtype=np.int32),
        sequence_starts=np.cumsum([0, *lengths]).astype(np.int32),
        decode_starts=np.full(len(chunks), PROMPT, dtype=np.int32),
        block_table=np.asarray([block for _, _, blocks in chunks for block in blocks], dtype=np.int32),
        block_starts=np.cumsum([0, *(len(blocks) for _, _, blocks in chunks)]).astype(np.int32),
        logits_rows=np.asarray(range(sum(lengths)) if rows is None else rows, dtype=np.int32),
    )


def in_chunks(runner: ModelRunner, tokens: Sequence[int], sizes: Sequence[int], blocks: Sequence[int]) -> torch.Tensor:
    """Logits of every token: of the prompt in whole blocks, then in chunks of `sizes` (repeated as often as needed)."""
    done, turn, logits = 0, 0, []
    while done < len(tokens):
        size = sizes[turn % len(sizes)]
        if done < PROMPT:
            size = min(-(-size // BLOCK) * BLOCK, PROMPT - done)
        chunk = tokens[done : done + size]
        held = blocks[: -(-(done + len(chunk)) // BLOCK)]
        logits.append(runner.forward(ragged([(chunk, done, held)])).clone())
        done, turn = done + len(chunk), turn + 1
    return torch.cat(logits)


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0"])
def test_logits_are_those_of_the_torch_runner(hf_folder: Path, quantization: str) -> None:
    files = gguf_files(hf_folder, quantization)
    expected = in_chunks(torch_runner(files), TEXT, [len(TEXT)], range(4))
    torch.testing.assert_close(
        in_chunks(openvino_runner(files), TEXT, [33, 1, 5], [3, 0, 2, 5]), expected, atol=2e-4, rtol=0.0
    )


@pytest.mark.parametrize("fixed_step_bytes", [0, 1 << 30])
def test_states_are_what_the_head_makes_logits_of(hf_folder: Path, fixed_step_bytes: int) -> None:
    """Of the wanted rows only, whatever was computed beside them."""
    files = gguf_files(hf_folder, "Q8_0")
    runner = openvino_runner(files, fixed_step_bytes=fixed_step_bytes, attends_in_blocks=True)
    head = load_model(files, device="cpu", dtype="float32").model.get_output_embeddings().weight
    for tokens, past, rows in ((TEXT[:PROMPT], 0, [5, 63]), (TEXT[PROMPT : PROMPT + 3], PROMPT, [2])):
        logits = runner.forward(ragged([(tokens, past, range(4))], rows))
        assert runner.last_states.shape == (len(rows), head.shape[1])
        torch.testing.assert_close(runner.last_states @ head.T[:, :262], logits, atol=2e-3, rtol=0.0)


@pytest.mark.parametrize(("quantization", "error"), [("F32", 0.01), ("F16", 0.01), ("Q4_1", 0.05)])
def test_other_formats_are_taken_over_with_a_small_error(hf_folder: Path, quantization: str, error: float) -> None:
    """Total variation of next-token laws, on average; Q4_1 is stored in 8 bits."""
    files = gguf_files(hf_folder, quantization)
    expected = in_chunks(torch_runner(files), TEXT, [len(TEXT)], range(4)).softmax(-1)
    actual = in_chunks(openvino_runner(files), TEXT, [len(TEXT)], range(4)).softmax(-1)
    assert float((expected - actual).abs().sum(-1).mean() / 2) < error


def test_openvino_s_own_reading_of_q4_1_is_still_wrong(hf_folder: Path, tmp_path: Path) -> None:
    """The reason for the detour through 8 bits. Once this fails, the detour can go."""
    files = gguf_files(hf_folder, "Q4_1")
    assert files.gguf is not None
    direct = tmp_path / "direct.gguf"
    direct.write_bytes(files.gguf.read_bytes())
    openvino_genai.LLMPipeline(str(direct), "CPU", enable_save_ov_model=True)
    read_directly = ModelFiles(folder=tmp_path, model_id="direct", revision="")
    expected = in_chunks(torch_runner(files), TEXT, [len(TEXT)], range(4)).softmax(-1)
    actual = in_chunks(openvino_runner(read_directly), TEXT, [len(TEXT)], range(4)).softmax(-1)
    assert float((expected - actual).abs().sum(-1).mean() / 2) > 0.1


def test_the_memory_of_the_cache_is_there_from_the_start(hf_folder: Path) -> None:
    """Given by the system at a block's first use, it made the first prompts of a service a fifth slower."""
    files, num_bytes = gguf_files(hf_folder, "Q8_0"), 1 << 28
    openvino_runner(files)  # what a first runner takes besides
    before = resident_bytes()
    runner = openvino_runner(files, kv_cache_bytes=num_bytes)
    assert resident_bytes() - before > 0.9 * num_bytes
    assert runner.num_blocks > 1


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(
    scope="module",
    params=[
        (kind, attends_in_blocks)
        for kind in (
            "Q8_0, fast",
            "Q8_0, fast without bfloat16",
            "Q8_0, float32",
            "Q4_1, fast",
            "Q4_1, float32",
            "Q4_0, fast",
        )
        for attends_in_blocks in (False, True)
    ],
    ids=lambda param: f"{param[0]}, {'in blocks' if param[1] else 'one by one'}",
)
def any_precision(request: pytest.FixtureRequest, hf_folder: Path) -> OpenVinoRunner:
    kind, attends_in_blocks = request.param
    quantization, _, kind = kind.partition(", ")
    capabilities = {} if kind == "fast without bfloat16" else torch.cpu.get_capabilities()
    precision = choose_precision("float32" if kind == "float32" else "auto", capabilities)
    # Steps of some sizes have a compiled graph of their own, others not: to the bit the same.
    return openvino_runner(
        gguf_files(hf_folder, quantization),
        precision=precision,
        attends_in_blocks=attends_in_blocks,
        fixed_step_bytes=1 << 30,
    )


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_no_split_of_a_text_changes_a_bit(any_precision: OpenVinoRunner, sizes: list[int]) -> None:
    whole = in_chunks(any_precision, TEXT, [len(TEXT)], [0, 1, 2, 3])
    assert torch.equal(in_chunks(any_precision, TEXT, sizes, [7, 5, 6, 4]), whole)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_neighbour_changes_a_bit(any_precision: OpenVinoRunner, data: st.DataObject) -> None:
    """Three texts side by side, each at a length of its own, against each alone; one of them is in its prompt."""
    texts = [TEXT, TEXT[5:], TEXT[:90]]
    pasts = [data.draw(st.integers(PROMPT, len(text) - 1)) for text in texts]
    counts = [data.draw(st.integers(1, len(text) - past)) for text, past in zip(texts, pasts, strict=True)]
    pasts[1], counts[1] = BLOCK, data.draw(st.sampled_from([BLOCK, len(texts[1]) - BLOCK]))
    alone, blocks = [], [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for text, past, count, held in zip(texts, pasts, counts, blocks, strict=True):
        alone.append(in_chunks(any_precision, text, [len(text)], held)[past : past + count])
    chunks = [(t[p : p + c], p, b) for t, p, c, b in zip(texts, pasts, counts, blocks, strict=True)]
    assert torch.equal(any_precision.forward(ragged(chunks)), torch.cat(alone))


def test_what_a_rejected_guess_left_in_a_block_is_forgotten(any_precision: OpenVinoRunner) -> None:
    expected = in_chunks(any_precision, TEXT, [5], [0, 1, 2, 3])
    in_chunks(any_precision, [*TEXT[:80], 1, 2, 3, 4, 5, 6], [16, 6], [4, 5, 6, 7])
    after = any_precision.forward(ragged([(TEXT[80:], 80, [4, 5, 6, 7])]))
    assert torch.equal(after, expected[80:])


def test_copied_blocks_go_their_own_way(any_precision: OpenVinoRunner) -> None:
    expected = in_chunks(any_precision, TEXT[:90], [90], [0, 1, 2])
    any_precision.copy_blocks([2], [6])
    any_precision.forward(ragged([([9, 9, 9], 80, [0, 1, 6])]))
    assert torch.equal(any_precision.forward(ragged([(TEXT[85:90], 85, [0, 1, 2])])), expected[85:])
    any_precision.copy_blocks([2, 6], [6, 7])  # pair by pair: 6 is overwritten, and then copied on
    assert torch.equal(any_precision.forward(ragged([(TEXT[85:90], 85, [0, 1, 7])])), expected[85:])


@pytest.mark.parametrize("rows", [[], [0], [3], [2, 4], list(range(5))])
def test_logits_come_for_the_rows_that_are_wanted(any_precision: OpenVinoRunner, rows: list[int]) -> None:
    whole = any_precision.forward(ragged([(TEXT[:5], 0, [0])])).clone()
    assert torch.equal(any_precision.forward(ragged([(TEXT[:5], 0, [0])], rows)), whole[rows])


@pytest.mark.parametrize("num_layers", range(1, LAYERS + 1))
def test_the_first_layers_are_a_model_too(hf_folder: Path, num_layers: int) -> None:
    files = gguf_files(hf_folder, "Q8_0")
    expected = in_chunks(torch_runner(files, num_layers=num_layers), TEXT, [len(TEXT)], range(4))
    runner = openvino_runner(files, num_layers=num_layers)
    torch.testing.assert_close(in_chunks(runner, TEXT, [len(TEXT)], range(4)), expected, atol=2e-4, rtol=0.0)


def test_layers_that_are_not_there_are_refused(hf_folder: Path) -> None:
    for num_layers in (0, LAYERS + 1):
        with pytest.raises(InvalidRequest, match="between 1 and the model's 3") as caught:
            openvino_runner(gguf_files(hf_folder, "Q8_0"), num_layers=num_layers)
        assert caught.value.param == "num_layers"


def test_steps_are_filled_up_to_the_next_size_that_has_a_graph(hf_folder: Path) -> None:
    runner = openvino_runner(gguf_files(hf_folder, "Q8_0"), attends_in_blocks=True, fixed_step_bytes=1 << 30)
    sizes = [runner.step_size(1, tokens_each=1 + k) for k in range(10)]
    assert sizes == [2, 2, 4, 4, 6, 6, 9, 9, 9, 16]
    assert [runner.step_size(n, tokens_each=3) for n in (8, 10, 12)] == [24, 32, 40]
    runner.forward(ragged([(TEXT[:5], PROMPT, [0, 1, 2])]))
    assert runner.last_step_size == 6
    runner.forward(ragged([(TEXT[:2], PROMPT, [0, 1, 2])]))
    assert runner.last_step_size == 2  # with open shapes the last size would be kept


@pytest.mark.parametrize(
    ("most_bytes", "sizes"),
    [(0, ()), (109, ()), (120, (1,)), (600, (1, 4, 9, 6, 16)), (10_000, (1, 4, 9, 6, 16, 32, 24))],
)
def test_as_many_sizes_have_a_graph_as_there_is_memory_for(most_bytes: int, sizes: tuple[int, ...]) -> None:
    assert affordable_sizes(least_size=1, weights_bytes=100, most_bytes=most_bytes) == sizes


def test_sizes_are_what_the_cache_and_the_tokenizer_allow(hf_folder: Path) -> None:
    files = gguf_files(hf_folder, "Q8_0")
    bytes_per_block = 2 * LAYERS * 2 * BLOCK * 16 * 4  # keys and values, layers, heads, tokens, head size, float32
    runner = openvino_runner(files, kv_cache_bytes=5 * bytes_per_block, most_token_ids=250)
    assert (runner.num_blocks, runner.block_size) == (4, BLOCK)  # one is set aside
    assert runner.context_length == 4 * BLOCK
    assert runner.vocab_size == 250
    assert runner.forward(ragged([(TEXT[:3], 0, [3])])).shape == (3, 250)
    with pytest.raises(InvalidRequest, match="at least three blocks"):
        openvino_runner(files, kv_cache_bytes=3 * bytes_per_block - 1)


def test_the_form_is_made_once_and_only_where_it_can_be(hf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = gguf_files(hf_folder, "Q8_0")
    model_file = openvino_model(files, print)
    with monkeypatch.context() as patched:
        patched.setattr(openvino_genai, "LLMPipeline", lambda *_, **__: pytest.fail("made again"))
        assert openvino_model(files, print) == model_file
    plain = ModelFiles(folder=hf_folder, model_id="tiny", revision="")
    assert has_openvino_form(files)
    assert not has_openvino_form(plain)
    with pytest.raises(InvalidRequest, match="choose engine torch"):
        openvino_model(plain, print)


@pytest.mark.parametrize("left", ["no form", "an older one"])
def test_a_form_of_another_version_is_made_anew(hf_folder: Path, left: str) -> None:
    files = gguf_files(hf_folder, "Q4_1")
    weights, form = (openvino_model(files, print).with_suffix(suffix) for suffix in (".bin", ".form"))
    expected = weights.read_bytes()
    weights.write_bytes(b"an older version's")
    form.unlink() if left == "no form" else form.write_text("1")
    openvino_model(files, print)
    assert weights.read_bytes() == expected


@pytest.mark.parametrize(("quantization", "group"), [("Q4_1", 64), ("Q8_0", 32), ("Q4_0", 32)])
def test_multiplications_of_the_same_numbers_are_one(hf_folder: Path, quantization: str, group: int) -> None:
    """Queries, keys and values; the halves of a gated layer: two for each layer beside these, the head, and RoPE's own.

    Weights of 4 bits, two in a byte, stay as they are. Activations are rounded in groups that the weights allow.
    """
    model_file = openvino_model(gguf_files(hf_folder, quantization), print)
    graph, _ = paged_graph(ov.Core(), model_file, num_layers=None, token_ids=None)
    count = sum(node.get_type_name() == "MatMul" for node in graph.get_ops())
    assert count == (7 if quantization == "Q4_0" else 4) * LAYERS + 2
    assert rounding_group(graph) == group


@pytest.mark.parametrize(
    ("dtype", "bfloat16", "inference", "rounds"),
    [
        ("auto", True, "bf16", True),
        ("auto", False, "f32", True),
        ("bfloat16", True, "bf16", True),
        ("float32", True, "f32", False),
    ],
)
def test_precision_follows_the_cpu(dtype: str, bfloat16: bool, inference: str, rounds: bool) -> None:
    precision = choose_precision(dtype, {"avx512_bf16": bfloat16})
    assert (precision.inference, precision.rounds_activations) == (inference, rounds)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_precision_that_is_not_there_is_refused(dtype: str) -> None:
    with pytest.raises(InvalidRequest, match="choose auto, float32 or engine torch"):
        choose_precision(dtype, {})
