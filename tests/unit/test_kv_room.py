"""Who may begin, by the targets' KV caches: the decision alone, then the queue that asks it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import Admission, Grant
from gateway.kv_room import AnswerSize, Place, Promised, Replica, find_places
from tandem.errors import Overloaded
from tandem.types import KvCache


def size(num_prompt_tokens: int, num_answer_tokens: int, *, prompt: int = 0) -> AnswerSize:
    return AnswerSize(prompt=prompt, num_prompt_tokens=num_prompt_tokens, num_answer_tokens=num_answer_tokens)


def replica(address: str, num_blocks: int, *, block_size: int = 16) -> Replica:
    return Replica(address=address, kv_cache=KvCache(num_blocks=num_blocks, block_size=block_size))


A, B = replica("a", 10), replica("b", 10)


def test_an_answer_takes_whole_blocks_for_its_prompt_and_all_its_tokens() -> None:
    assert find_places([size(10, 6)], [A], {}) == (Place("a", 16),)
    assert find_places([size(10, 7)], [A], {}) == (Place("a", 32),)


def test_what_does_not_fit_beside_the_promises_has_no_place() -> None:
    promised = {"a": Promised(3, 128)}
    assert find_places([size(16, 16)], [A], promised) == (Place("a", 32),)
    assert find_places([size(16, 17)], [A], promised) is None


def test_the_capacity_is_each_replicas_own() -> None:
    """Two halves that are free do not hold a whole."""
    half = {"a": Promised(1, 80), "b": Promised(1, 80)}
    assert find_places([size(60, 60)], [A, B], half) is None
    assert find_places([size(60, 20)], [A, B], half) == (Place("a", 80),)


def test_answers_go_where_the_fewest_are_and_there_is_room() -> None:
    assert find_places([size(1, 1)], [A, B], {"a": Promised(1, 16)}) == (Place("b", 16),)
    assert find_places([size(1, 20)], [A, B], {"a": Promised(2, 32), "b": Promised(1, 144)}) == (Place("a", 32),)


def test_answers_to_one_prompt_share_its_whole_blocks_at_one_replica() -> None:
    """33 prompt tokens are two whole blocks, and one token that everybody computes."""
    places = find_places([size(33, 10)] * 3, [A], {})
    assert places == (Place("a", 48), Place("a", 16), Place("a", 16))
    assert find_places([size(33, 10)] * 3, [A, B], {}) == (Place("a", 48), Place("b", 48), Place("a", 16))


def test_the_last_token_of_a_prompt_is_computed_by_each() -> None:
    assert find_places([size(32, 10)] * 2, [A], {}) == (Place("a", 48), Place("a", 32))


def test_other_prompts_share_nothing() -> None:
    assert find_places([size(33, 10), size(33, 10, prompt=1)], [A], {}) == (Place("a", 48), Place("a", 48))


def test_what_was_promised_at_a_replica_that_is_gone_is_needed_elsewhere() -> None:
    assert find_places([size(16, 16)], [A], {"b": Promised(1, 128)}) == (Place("a", 32),)
    assert find_places([size(16, 17)], [A], {"b": Promised(1, 128)}) is None


def test_a_target_that_does_not_say_what_it_has_takes_anything() -> None:
    silent = Replica(address="s", kv_cache=None)
    assert find_places([size(10**6, 10**6)] * 2, [silent], {"s": Promised(9, 0)}) == (Place("s", 0), Place("s", 0))


SIZES = st.lists(st.builds(size, st.integers(1, 200), st.integers(1, 200), prompt=st.integers(0, 1)), max_size=6)
PROMISES = st.builds(Promised, st.integers(1, 5), st.integers(0, 400))


@given(
    sizes=SIZES,
    blocks=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    promised=st.dictionaries(st.sampled_from("abcd"), PROMISES),
)
def test_no_replica_is_ever_promised_more_than_it_has(
    sizes: list[AnswerSize], blocks: list[int], promised: dict[str, Promised]
) -> None:
    replicas = [replica(address, number) for address, number in zip("abc", blocks, strict=False)]
    before = {one.address: promised.get(one.address, Promised()).num_tokens for one in replicas}
    places = find_places(sizes, replicas, promised)
    if places is None or not places:
        return
    for one in replicas:
        added = sum(place.num_tokens for place in places if place.address == one.address)
        assert one.kv_cache is not None
        assert not added or before[one.address] + added <= one.kv_cache.num_tokens
    assert len(places) == len(sizes)


async def waits(admission: Admission, sizes: Sequence[AnswerSize]) -> asyncio.Task[Grant]:
    task = asyncio.create_task(admission.acquire(sizes))
    await asyncio.sleep(0)
    return task


async def test_a_request_waits_until_its_blocks_are_free() -> None:
    admission = Admission(max_running=9, max_queued=9, replicas=lambda: [A])
    first = await admission.acquire([size(16, 100)])
    assert (first.target_of(0), admission.num_promised_tokens) == ("a", 128)
    second = await waits(admission, [size(16, 17)])
    assert (admission.waiting, second.done()) == (1, False)
    admission.release(first)
    admission.release(await asyncio.wait_for(second, 1))
    assert (admission.running, admission.waiting, admission.num_promised_tokens) == (0, 0, 0)


async def test_a_small_request_does_not_pass_a_large_one_that_waits() -> None:
    """Fair order: else small ones, one after another, would keep the large one waiting for ever."""
    admission = Admission(max_running=9, max_queued=9, replicas=lambda: [A])
    running = [await admission.acquire([size(16, 48)]) for _ in range(2)]
    large, small = await waits(admission, [size(16, 80)]), await waits(admission, [size(1, 1)])
    assert (large.done(), small.done()) == (False, False)
    assert admission.num_promised_tokens == 128  # of 160: the small one's 16 would fit
    admission.release(running[0])
    await asyncio.wait_for(large, 1)
    assert not small.done()
    admission.release(running[1])
    await asyncio.wait_for(small, 1)


async def test_who_finds_the_queue_full_of_those_who_wait_for_blocks_is_refused() -> None:
    admission = Admission(max_running=9, max_queued=1, replicas=lambda: [A])
    first = await admission.acquire([size(100, 60)])
    second = await waits(admission, [size(1, 1)])
    with pytest.raises(Overloaded):
        await admission.acquire([size(1, 1)])
    admission.release(first)
    await asyncio.wait_for(second, 1)


async def test_a_replica_that_comes_back_lets_the_waiting_in() -> None:
    up = [A]
    admission = Admission(max_running=9, max_queued=9, replicas=lambda: up)
    await admission.acquire([size(100, 60)])
    second = await waits(admission, [size(100, 60)])
    up.append(B)
    assert (await asyncio.wait_for(second, 5)).target_of(0) == "b"


async def test_what_only_fits_when_all_targets_are_up_does_not_wait_for_one_that_is_gone() -> None:
    admission = Admission(max_running=9, max_queued=9, replicas=lambda: [A])
    grant = await asyncio.wait_for(admission.acquire([size(100, 60)] * 2), 1)
    assert (grant.count, grant.target_of(1)) == (2, None)


async def test_without_a_target_the_count_alone_decides() -> None:
    admission = Admission(max_running=2, max_queued=9)
    await admission.acquire([size(10**6, 1)])
    await admission.acquire([size(10**6, 1)])
    third = await waits(admission, [size(1, 1)])
    assert not third.done()
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    assert admission.waiting == 0
