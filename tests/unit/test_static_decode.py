"""Decode steps in fixed shapes against the dynamic path, and on a tape that plays the part of a CUDA graph.

The tape records the operations of one step and repeats them: whatever Python decided while it recorded stays decided,
shapes stay, and memory is read where it was read. A step that depends on its data in any other way than through the
bucket's buffer gives wrong logits when it is repeated with other data.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch

from tandem.engine.runner import RaggedBatch
from tandem.engine.static_context import Bucket, bucket_of
from tandem.engine.static_decode import Rows, StaticDecoder, Step, as_it_is
from tests.tapes import NUM_BLOCKS, TapeRecorder, make_runner, prefill
from tests.tiny_families import BLOCK, FAMILIES, VOCAB, Chunk, assert_same, make_model, pack, prompt, whole

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def refused(step: Step) -> Step:
    raise RuntimeError("operation not permitted when stream is capturing")


def expected_logits(family: str, lengths: Sequence[int], new: Sequence[int], *, seed: int) -> torch.Tensor:
    rows = [
        whole(family, prompt(length, seed=100 * seed + i))[-count:]
        for i, (length, count) in enumerate(zip(lengths, new, strict=True))
    ]
    return torch.cat(rows)


BATCHES = {
    "one token": ([50], [1]),
    "a first token": ([1], [1]),
    "verify blocks that fill the bucket": ([40, 90], [5, 5]),
    "padding in new tokens": ([40], [7]),
    "padding in everything": ([30, 61, 18, 100, 17], [1, 4, 2, 9, 17]),
    "single tokens": ([20, 25, 30, 35, 40, 45], [1] * 6),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_fixed_shapes_give_the_logits_of_the_dynamic_path(family: str, name: str) -> None:
    lengths, new = BATCHES[name]
    static, dynamic = make_runner(family, as_it_is), make_runner(family, None)
    batch = pack(prefill(static, lengths, new, seed=1))
    prefill(dynamic, lengths, new, seed=1)
    assert bucket_of(batch) is not None
    logits = static.forward(batch)
    torch.testing.assert_close(logits, dynamic.forward(batch), atol=1e-4, rtol=1e-4)
    assert_same(logits, expected_logits(family, lengths, new, seed=1))
    assert logits.is_contiguous()
    torch.testing.assert_close(static.last_states, dynamic.last_states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_step_answers_for_any_other_batch_of_its_bucket(family: str) -> None:
    """Recorded with one batch; then repeated with other tokens, lengths, pasts, blocks and numbers of sequences."""
    recorder = TapeRecorder()
    runner = make_runner(family, recorder)
    of_one_bucket = [([30, 61, 18], [1, 4, 2]), ([100, 9, 44, 5], [5, 5, 1, 5]), ([6, 50, 70], [4, 3, 5])]
    for seed, (lengths, new) in enumerate(of_one_bucket):
        batch = pack(prefill(runner, lengths, new, seed=seed))
        before, played = len(recorder.tapes), recorder.num_played
        assert bucket_of(batch) == Bucket(4, 5, 256)
        logits = runner.forward(batch)
        assert_same(logits, expected_logits(family, lengths, new, seed=seed))
        read = make_model(family).get_output_embeddings()(runner.last_states.clone())
        assert torch.equal(read[:, :VOCAB].argmax(dim=-1), logits.argmax(dim=-1))  # some families bend logits behind it
        assert (len(recorder.tapes) > before) == (seed == 0)
        assert recorder.num_played == played + 1


def test_greedy_text_of_recorded_steps_equals_the_plain_models() -> None:
    recorder = TapeRecorder()
    runner = make_runner("gemma3", recorder)
    text, blocks = prompt(20), list(range(60, 20, -1))
    logits = runner.forward(pack([Chunk(text, 0, blocks, "last")]))
    for _ in range(40):
        text.append(int(logits[-1].argmax()))
        logits = runner.forward(pack([Chunk(text[-1:], len(text) - 1, blocks)]))
    assert text[20:] == whole("gemma3", text)[19:-1].argmax(-1).tolist()


def test_recorded_steps_leave_a_cache_that_the_dynamic_path_reads_and_the_reverse() -> None:
    runner = make_runner("llama", TapeRecorder())
    tokens, blocks = prompt(60), list(range(5, 25))
    parts = [runner.forward(pack([Chunk(tokens[a:b], a, blocks)])).clone() for a, b in ((0, 9), (9, 40), (40, 60))]
    assert_same(torch.cat(parts), whole("llama", tokens))


def test_only_the_rows_that_are_wanted_come_back() -> None:
    runner = make_runner("llama", TapeRecorder())
    lengths, new = [30, 61, 18], [3, 4, 2]
    chunks = prefill(runner, lengths, new, seed=1)
    expected = expected_logits("llama", lengths, new, seed=1)
    chunks[0].rows, chunks[1].rows, chunks[2].rows = "last", "none", "all"
    assert_same(runner.forward(pack(chunks)), expected[[2, 7, 8]])
    for chunk in chunks:
        chunk.rows = "none"
    assert runner.forward(pack(chunks)).shape == (0, VOCAB)


def test_padding_writes_into_no_sequences_blocks() -> None:
    runner = make_runner("llama", as_it_is)
    chunks = prefill(runner, [30, 61, 18], [1, 4, 2], seed=1)
    before = [cache.clone() for cache in runner._keys]
    runner.forward(pack(chunks))
    written = sorted(
        chunk.blocks[position // BLOCK] * BLOCK + position % BLOCK
        for chunk in chunks
        for position in range(chunk.past, chunk.past + len(chunk.tokens))
    )
    for cache, old in zip(runner._keys, before, strict=True):
        changed = (cache != old).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert [slot for slot in changed if slot < NUM_BLOCKS * BLOCK] == written


def test_a_sick_sequence_and_old_padding_cannot_poison_another() -> None:
    runner = make_runner("llama", TapeRecorder())
    chunks = prefill(runner, [6, 30, 11], [1, 2, 2], seed=1)
    for cache in (*runner._keys, *runner._values):
        cache.view(NUM_BLOCKS + 1, BLOCK, *cache.shape[1:])[[*chunks[1].blocks, NUM_BLOCKS]] = torch.nan
    for _ in range(2):  # recorded, then repeated
        logits = runner.forward(pack(chunks))
        assert_same(logits[[0, 3, 4]], expected_logits("llama", [6, 30, 11], [1, 2, 2], seed=1)[[0, 3, 4]])


def batch_of(num_sequences: int, num_new: int, num_keys: int) -> RaggedBatch:
    """Only its sizes are meant."""
    return pack([Chunk([1] * num_new, num_keys - num_new, [0] * -(-num_keys // BLOCK))] * num_sequences)


@pytest.mark.parametrize(
    ("sizes", "bucket"),
    [
        ((1, 1, 1), Bucket(1, 1, 256)),
        ((1, 4, 256), Bucket(1, 5, 256)),
        ((1, 6, 257), Bucket(1, 9, 512)),
        ((3, 17, 300), Bucket(4, 17, 512)),
        ((64, 1, 2048), Bucket(64, 1, 2048)),
        ((33, 5, 900), Bucket(64, 5, 1024)),
        ((1, 18, 100), None),  # a prefill
        ((65, 1, 10), None),
        ((64, 9, 100), None),  # too many logits
        ((1, 1, 4097), None),
        ((64, 1, 2049), None),  # too many keys together
    ],
)
def test_buckets(sizes: tuple[int, int, int], bucket: Bucket | None) -> None:
    assert bucket_of(batch_of(*sizes)) == bucket


def test_the_steps_used_last_are_kept() -> None:
    recorded: list[Step] = []

    def capture(step: Step) -> Step:
        recorded.append(step)
        return step

    caches = [torch.zeros(65 * BLOCK, 1, 2)]
    decoder = StaticDecoder(
        lambda tokens, positions, context: Rows(torch.zeros(tokens.shape[1], 3), torch.zeros(tokens.shape[1], 2)),
        caches,
        caches,
        block_size=BLOCK,
        spare_block=64,
        capture=capture,
        most_steps=2,
    )
    one, two, three = (batch_of(1, count, 20) for count in (1, 2, 3))
    for batch, num_recorded in ((one, 1), (two, 2), (one, 2), (three, 3), (one, 3), (two, 4), (three, 5)):
        decoder.forward(batch)
        assert len(recorded) == num_recorded


def test_a_model_that_cannot_be_recorded_is_served_without_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runner = make_runner("llama", refused)
        tokens, blocks = prompt(30), list(range(20))
        parts = [runner.forward(pack([Chunk(tokens[a:b], a, blocks)])) for a, b in ((0, 20), (20, 25), (25, 30))]
    assert_same(torch.cat(parts), whole("llama", tokens))
    assert [record.message.partition(":")[0] for record in caplog.records] == ["decode steps are not recorded"]


def test_the_tape_notices_a_step_that_looks_at_its_numbers() -> None:
    """The negative control: what these tests rest on."""
    data = torch.tensor([1.0])
    with pytest.raises(RuntimeError, match="while recording"):
        TapeRecorder()(lambda: Rows(data * 2 if bool(data > 0) else data, data))
    frozen = [2.0]
    play = TapeRecorder()(lambda: Rows(data * frozen[0], data))
    frozen[0] = 3.0
    data.fill_(5.0)
    assert play().logits.tolist() == [10.0]  # the tensor is read anew, Python's number is not
