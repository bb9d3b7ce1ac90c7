"""The block pool: which ids go out in which order, and what can be found again."""

import pytest

from engine.blocks import NO_PREFIX, BlockPool, PrefixId

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)


def _publish(pool: BlockPool, block_ids: tuple[int, ...], *chunks: tuple[int, ...]) -> PrefixId:
    prefix = NO_PREFIX
    for block_id, tokens in zip(block_ids, chunks, strict=True):
        prefix = pool.publish((block_id,), prefix, tokens)
    return prefix


def test_fresh_blocks_go_out_in_order() -> None:
    pool = BlockPool(4, 4)
    assert pool.allocate(3) == (0, 1, 2)
    assert (pool.num_free, pool.num_used) == (1, 3)


def test_allocating_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(3, 4)
    pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.num_free == 1


def test_tail_of_a_freed_sequence_goes_out_first() -> None:
    pool = BlockPool(3, 4)
    held = pool.allocate(3)
    assert held is not None
    _publish(pool, held, A, B, C)
    pool.free(held)
    assert pool.allocate(3) == (2, 1, 0)


def test_least_recently_used_sequence_goes_out_first() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first is not None and second is not None
    _publish(pool, first, A, B)
    _publish(pool, second, B, C)
    pool.free(second)
    pool.free(first)
    assert pool.allocate(4) == (3, 2, 1, 0)


def test_sharing_a_block_again_makes_it_recently_used() -> None:
    pool = BlockPool(2, 4)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None and second is not None
    _publish(pool, first, A)
    _publish(pool, second, B)
    pool.free(first)
    pool.free(second)
    pool.share(first)
    pool.free(first)
    assert pool.allocate(2) == (1, 0)


def test_blocks_that_cannot_be_found_go_out_before_cached_ones() -> None:
    pool = BlockPool(3, 4)
    held = pool.allocate(2)
    assert held is not None
    _publish(pool, held[:1], A)
    pool.free(held)
    assert pool.allocate(3) == (1, 2, 0)


def test_cached_blocks_of_a_passing_sequence_go_out_before_those_of_a_chat_freed_earlier() -> None:
    pool = BlockPool(4, 4)
    chat, title = pool.allocate(2), pool.allocate(2)
    assert chat is not None and title is not None
    _publish(pool, chat, A, B)
    _publish(pool, title, B, C)
    pool.free(chat)
    pool.free(title, keep=False)
    assert pool.allocate(4) == (3, 2, 1, 0)


def test_block_of_a_chat_that_a_passing_sequence_shared_last_is_still_kept() -> None:
    pool = BlockPool(3, 4)
    chat, title = pool.allocate(1), pool.allocate(1)
    assert chat is not None and title is not None
    _publish(pool, chat, A)
    _publish(pool, title, B)
    pool.free(chat)
    pool.share(chat)
    pool.free(title, keep=False)
    pool.free(chat, keep=False)
    pool.check([])
    assert pool.allocate(3) == (2, 1, 0)


def test_block_handed_out_again_forgets_that_it_was_kept() -> None:
    pool = BlockPool(2, 4)
    first = pool.allocate(2)
    assert first is not None
    _publish(pool, first, A, B)
    pool.free(first)
    passing, chat = pool.allocate(1), pool.allocate(1)
    assert passing is not None and chat is not None
    _publish(pool, passing, A)
    _publish(pool, chat, B)
    pool.free(chat)
    pool.free(passing, keep=False)
    assert pool.allocate(2) == (passing[0], chat[0])


def test_freed_block_keeps_its_key_until_it_is_handed_out() -> None:
    pool = BlockPool(2, 4)
    held = pool.allocate(1)
    assert held is not None
    _publish(pool, held, A)
    pool.free(held)
    assert pool.match(A, 4).block_ids == (0,)
    assert pool.allocate(2) == (1, 0)
    assert pool.match(A, 4).block_ids == ()


def test_match_stops_at_the_first_unknown_block_and_counts_idle_ones() -> None:
    pool = BlockPool(4, 4)
    held = pool.allocate(2)
    assert held is not None
    last = _publish(pool, held, A, B)
    pool.free(held)
    pool.share(held[:1])
    match = pool.match(A + B + C, 12)
    assert match == (((0, 1),), (0, 1), last, 1)
    assert pool.match(A + C + B, 12).block_ids == (0,)


@pytest.mark.parametrize(("max_tokens", "num_blocks"), [(3, 0), (4, 1), (7, 1), (8, 2)])
def test_match_takes_full_blocks_within_its_limit(max_tokens: int, num_blocks: int) -> None:
    pool = BlockPool(4, 4)
    held = pool.allocate(2)
    assert held is not None
    _publish(pool, held, A, B)
    assert len(pool.match(A + B, max_tokens).block_ids) == num_blocks


def test_same_tokens_after_another_beginning_are_another_block() -> None:
    pool = BlockPool(4, 4)
    held = pool.allocate(2)
    assert held is not None
    _publish(pool, held, A, B)
    assert pool.match(B, 4).block_ids == ()
    assert pool.match(C + B, 8).block_ids == ()


def test_block_whose_beginning_was_forgotten_is_not_found_after_a_new_one() -> None:
    """A child of a forgotten block must not turn up behind another one."""
    pool = BlockPool(3, 4)
    parent, child = pool.allocate(1), pool.allocate(1)
    assert parent is not None and child is not None
    forgotten = pool.publish(parent, NO_PREFIX, A)
    pool.publish(child, forgotten, B)
    pool.free(parent)
    assert pool.allocate(2) == (2, 0)
    pool.publish((0,), NO_PREFIX, C)
    assert pool.match(C + B, 8).block_ids == (0,)


def test_second_block_with_a_known_prefix_stays_unfound_but_continues_the_chain() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(1), pool.allocate(2)
    assert first is not None and second is not None
    _publish(pool, first, A)
    _publish(pool, second, A, B)
    assert pool.match(A + B, 8).block_ids == (first[0], second[1])


def test_shared_block_is_free_when_the_last_holder_leaves() -> None:
    pool = BlockPool(2, 4)
    held = pool.allocate(1)
    assert held is not None
    _publish(pool, held, A)
    pool.share(held)
    pool.free(held)
    assert pool.num_used == 1
    pool.check([held])
    pool.free(held)
    assert pool.num_used == 0


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, 4, enable_prefix_caching=False)
    held = pool.allocate(1)
    assert held is not None
    _publish(pool, held, A)
    assert pool.match(A, 4).block_ids == ()


def test_freeing_twice_is_a_fault() -> None:
    pool = BlockPool(2, 4)
    held = pool.allocate(1)
    assert held is not None
    pool.free(held)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(held)


def test_check_finds_a_leaked_block() -> None:
    pool = BlockPool(2, 4)
    held = pool.allocate(1)
    assert held is not None
    pool.check([held])
    with pytest.raises(AssertionError, match="references and tables differ"):
        pool.check([])


def test_a_cut_forgets_what_nobody_holds_and_moves_what_somebody_does() -> None:
    pool = BlockPool(6, 4)
    low, high = pool.allocate(3), pool.allocate(3)
    assert low is not None and high is not None
    _publish(pool, low[:1], A)
    _publish(pool, high[:2], B, C)
    pool.free(low)
    pool.free(high[1:])
    assert pool.resize(3) == {3: 1}  # never cached, so the first to go
    assert (pool.num_blocks, pool.num_free) == (3, 2)
    assert pool.match(A, 4).block_ids == (0,)
    assert pool.match(B + C, 8).block_ids == (1,)
    pool.check([(1,)])


def test_a_moved_block_is_shared_as_before() -> None:
    pool = BlockPool(4, 4)
    pool.allocate(2)
    held = pool.allocate(2)
    assert held is not None
    _publish(pool, held, A, B)
    pool.share(held)
    pool.free((0, 1))
    moves = pool.resize(2)
    table = tuple(moves[block_id] for block_id in held)
    pool.check([table, table])
    pool.free(table)
    assert pool.num_used == 2


def test_blocks_that_come_back_are_free() -> None:
    pool = BlockPool(4, 4)
    pool.resize(1)
    assert pool.allocate(2) is None
    assert pool.resize(3) == {}
    assert sorted(pool.allocate(3) or ()) == [0, 1, 2]


def test_a_cut_through_more_than_fits_below_is_told_in_blocks() -> None:
    pool = BlockPool(6, 4)
    pool.allocate(2)
    pool.allocate(3)
    assert [pool.missing_below(count) for count in (6, 5, 4, 2)] == [0, 0, 1, 3]


def test_blocks_that_nobody_holds_count_as_cached_while_the_prefix_cache_finds_them() -> None:
    pool = BlockPool(4, 2)
    taken = pool.allocate(3)
    assert taken is not None
    pool.publish(taken[:1], NO_PREFIX, (1, 2))
    assert pool.num_cached == 0, "it is held"
    pool.free(taken)
    assert (pool.num_free, pool.num_cached) == (4, 1)
    assert pool.allocate(4) is not None
    assert pool.num_cached == 0
