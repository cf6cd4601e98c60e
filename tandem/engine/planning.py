"""What the next forward computes: which jobs' feeds, how many tokens of each, packed into one ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.engine.programs import Feed, Job
from tandem.engine.runner import RaggedBatch
from tandem.engine.session import Session

# Feeds of one background step. A round that arrives in the middle waits for it to end, so it must not be long.
MAX_BACKGROUND_FEEDS = 8


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` uncached tokens of a job's feed."""

    job: Job
    feed: Feed
    num_tokens: int
    completes: bool


def plan_step(jobs: Sequence[Job], *, max_tokens: int, block_size: int) -> list[Chunk]:
    """At most `max_tokens` tokens: rounds first, then prefills; background jobs where there is no other.

    Sessions take over cached blocks that hold their next tokens, and give up the cache of rows that are wanted.
    """
    waiting = [(job, job.feed) for job in jobs if isinstance(job.feed, Feed)]
    waiting = [pair for pair in waiting if not pair[0].background] or waiting[:MAX_BACKGROUND_FEEDS]
    for _, feed in waiting:
        feed.session.rewind(len(feed.session.tokens) - feed.num_rows)
        feed.session.reuse_prefix(feed.num_rows)
    rounds = [pair for pair in waiting if pair[1].is_round(block_size=block_size)]
    prefills = [pair for pair in waiting if not pair[1].is_round(block_size=block_size)]
    budget = max_tokens
    chunks: list[Chunk] = []
    planned: dict[Session, None] = {}
    for job, feed in [*rounds, *prefills]:
        # However many rounds there are, one block a step is left for prefill, so that it cannot starve. Only the first
        # in line may take all: a round as large as a step would never fit otherwise.
        left = block_size if prefills and chunks and feed.is_round(block_size=block_size) else 0
        room, missing = budget - left, feed.num_missing
        num_tokens = missing if missing <= room else _part(feed, room, block_size=block_size)
        if num_tokens < 1 or feed.session in planned:
            continue
        planned[feed.session] = None
        chunks.append(Chunk(job, feed, num_tokens, completes=num_tokens == missing))
        budget -= num_tokens
    return chunks


def _part(feed: Feed, room: int, *, block_size: int) -> int:
    """How many of a feed's tokens to compute now, of `room` that are too few for all of them; may be none.

    The last rows stay together, since their logits come from one forward. Prompts are cut at whole blocks, so that
    they are computed in the same pieces however busy the model is.
    """
    session = feed.session
    end = min(session.cached + room, len(session.tokens) - feed.num_rows)
    whole = end // block_size * block_size
    return (whole if session.cached < whole and end < session.decode_start else end) - session.cached


def ragged_batch(chunks: Sequence[Chunk]) -> RaggedBatch:
    """Pack chunks. Rows are wanted of chunks that complete their feed only."""
    sessions = [chunk.feed.session for chunk in chunks]
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    rows: list[int] = []
    starts, block_starts = [0], [0]
    for chunk, session in zip(chunks, sessions, strict=True):
        end = session.cached + chunk.num_tokens
        token_ids += session.tokens[session.cached : end]
        positions += range(session.cached, end)
        starts.append(len(token_ids))
        blocks += session.blocks
        block_starts.append(len(blocks))
        if chunk.completes:
            rows += range(len(token_ids) - chunk.feed.num_rows, len(token_ids))
    return RaggedBatch(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        position_ids=np.asarray(positions, dtype=np.int32),
        past_lens=np.asarray([session.cached for session in sessions], dtype=np.int32),
        sequence_starts=np.asarray(starts, dtype=np.int32),
        decode_starts=np.asarray([session.decode_start for session in sessions], dtype=np.int32),
        block_table=np.asarray(blocks, dtype=np.int32),
        block_starts=np.asarray(block_starts, dtype=np.int32),
        logits_rows=np.asarray(rows, dtype=np.int32),
    )
