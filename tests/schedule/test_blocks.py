"""The block pool: reuse, eviction, isolation, and invariants under random use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import BLOCK
from shardwise.params import SamplingParams
from shardwise.schedule.blocks import BlockPool
from shardwise.schedule.sequence import Request, Sequence

SECRET = b"secret"


def sequence(tokens: list[int], salt: bytes = b"", number: int = 0) -> Sequence:
    request = Request(number, tuple(tokens), SamplingParams(), seed=0, salt=salt)
    return Sequence(request, arrival=number, max_len=10**6, stops=frozenset())


def admitted(pool: BlockPool, tokens: list[int], salt: bytes = b"") -> Sequence:
    one = sequence(tokens, salt)
    assert pool.admit(one, spare=0)
    return one


def computed(pool: BlockPool, tokens: list[int], salt: bytes = b"") -> Sequence:
    one = admitted(pool, tokens, salt)
    one.computed = len(tokens)
    pool.commit(one)
    return one


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def test_full_blocks_are_shared_while_in_use() -> None:
    """Guards prefix reuse: equal full blocks are one block, the part-filled last one is private."""
    pool = BlockPool(10, SECRET, prefix_cache=True)
    first = computed(pool, tokens(40))
    second = admitted(pool, [*tokens(32), 99, 98])
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert (second.computed, second.committed) == (32, 2)
    assert pool.num_free == 6
    pool.check([first, second])
    pool.release(first)
    pool.check([second])
    pool.release(second)
    pool.check([])
    assert pool.num_free == 10


@pytest.mark.parametrize(("length", "hit"), [(16, 0), (17, 16), (32, 16), (33, 32), (48, 32)])
def test_one_token_is_left_to_compute(length: int, hit: int) -> None:
    """Guards against a fully cached prompt with nothing to compute, hence nothing to sample from."""
    pool = BlockPool(10, SECRET, prefix_cache=True)
    pool.release(computed(pool, tokens(48)))
    assert admitted(pool, tokens(length)).computed == hit


def test_content_is_reusable_only_once_computed() -> None:
    """Guards against sharing a block whose KV is not there yet."""
    pool = BlockPool(10, SECRET, prefix_cache=True)
    first = admitted(pool, tokens(40))
    assert pool.find(tokens(40), b"", []) == []
    first.computed = 31
    pool.commit(first)
    assert pool.find(tokens(40), b"", []) == first.blocks[:1]
    pool.release(first)
    assert len(pool.find(tokens(40), b"", [])) == 1
    pool.check([])


def test_equal_blocks_computed_at_once_are_merged() -> None:
    """Guards memory, and the invariant that whoever holds a cached block holds the one before it."""
    pool = BlockPool(10, SECRET, prefix_cache=True)
    pair = [admitted(pool, tokens(40)), admitted(pool, tokens(40))]
    assert pool.num_free == 4
    for one in pair:
        one.computed = 40
        pool.commit(one)
    assert pair[0].blocks[:2] == pair[1].blocks[:2]
    assert pair[0].blocks[2] != pair[1].blocks[2]
    assert pool.num_free == 6
    pool.check(pair)


def test_eviction_takes_the_least_recent_chain_and_its_tail_first() -> None:
    """Guards against evicting the head of a chain, which makes the rest of it useless, or what was just used."""
    pool = BlockPool(6, SECRET, prefix_cache=True)
    old, new = tokens(48), tokens(48, first=100)
    pool.release(computed(pool, old))
    pool.release(computed(pool, new))
    assert pool.num_free == 6
    for left in (2, 1, 0):
        computed(pool, tokens(16, first=1000 * (left + 1)))
        assert len(pool.find([*old, 0], b"", [])) == left
        assert len(pool.find([*new, 0], b"", [])) == 3


def test_a_hit_renews_a_chain() -> None:
    """Guards the order of eviction: least recently used, not least recently computed."""
    pool = BlockPool(4, SECRET, prefix_cache=True)
    first, second = tokens(32), tokens(32, first=100)
    pool.release(computed(pool, first))
    pool.release(computed(pool, second))
    again = sequence([*first, 0])
    assert pool.admit(again, spare=0)
    pool.release(again)
    assert len(pool.find([*first, 0], b"", [])) == 2
    assert len(pool.find([*second, 0], b"", [])) == 1


@pytest.mark.parametrize("digest", [lambda data: b"", lambda data: bytes([len(data) % 2]), lambda data: data[-8:]])
def test_collisions_never_share_a_wrong_block(digest: Callable[[bytes], bytes]) -> None:
    """Guards C65: under a hash that collides all the time, a hit still has equal tokens and an equal past."""
    pool = BlockPool(20, SECRET, prefix_cache=True, digest=digest)
    same_end = tokens(16, first=50)
    first = computed(pool, [*tokens(16), *same_end, 0])
    second = computed(pool, [*tokens(16, first=200), *same_end, 0])
    pool.check([first, second])
    assert not set(first.blocks) & set(second.blocks)
    third = admitted(pool, [*tokens(16, first=200), *same_end, 0])
    assert not set(third.blocks[: third.computed // BLOCK]) - set(second.blocks)
    assert pool.find([*same_end, 0], b"", []) == []
    assert pool.find([*tokens(16), *same_end, 0], b"", [])[:1] in ([], first.blocks[:1])
    pool.check([first, second, third])


@pytest.mark.parametrize("digest", [None, lambda data: b"", lambda data: data[-8:]])
def test_salts_never_share(digest: Callable[[bytes], bytes] | None) -> None:
    """Guards C66: equal tokens under another salt are other content, whatever the hash does."""
    pool = BlockPool(20, SECRET, prefix_cache=True, digest=digest)
    first = computed(pool, tokens(40), salt=b"adapter")
    assert pool.find(tokens(40), b"", []) == []
    second = computed(pool, tokens(40))
    assert not set(first.blocks) & set(second.blocks)
    assert pool.find(tokens(40), b"adapter", [])[0] == first.blocks[0]
    if digest is None:  # and one salt does not keep the other from being cached
        assert pool.find(tokens(40), b"", []) == second.blocks[:2]
    pool.check([first, second])


def test_the_secret_keys_the_digests() -> None:
    """Guards against digests that an outsider can compute, and so aim at collisions."""
    chains: list[list[bytes]] = []
    for secret in (b"one", b"two"):
        one = computed(BlockPool(4, secret, prefix_cache=True), tokens(40))
        chains.append(one.digests)
    assert len(chains[0]) == len(chains[1]) == 3
    assert not set(chains[0]) & set(chains[1])


def test_a_refused_admission_changes_nothing() -> None:
    """Guards against leaking blocks, and against counting blocks that a hit will pin as still free."""
    pool = BlockPool(4, SECRET, prefix_cache=True)
    pool.release(computed(pool, tokens(48)))
    big = sequence(tokens(65))
    assert not pool.admit(big, spare=0)
    assert not pool.admit(sequence(tokens(64)), spare=1)
    assert (big.blocks, big.computed) == ([], 0)
    assert pool.num_free == 4
    pool.check([])
    assert pool.admit(sequence(tokens(64)), spare=0)


def test_growth_takes_one_block_at_a_boundary() -> None:
    """Guards the block arithmetic of a decode, and that a full pool is said and not raised."""
    pool = BlockPool(2, SECRET, prefix_cache=True)
    one = admitted(pool, tokens(16))
    assert pool.grow(one)
    assert len(one.blocks) == 1
    one.tokens.append(7)
    assert pool.grow(one)
    assert len(one.blocks) == 2
    one.tokens.extend(tokens(16))
    assert not pool.grow(one)
    pool.check([one])


def test_without_prefix_cache_nothing_is_reused() -> None:
    """Guards the switch."""
    pool = BlockPool(4, SECRET, prefix_cache=False)
    pool.release(computed(pool, tokens(40)))
    assert admitted(pool, tokens(40)).computed == 0


def test_clear_forgets_all_content() -> None:
    """Guards against hits on KV that died with its worker."""
    pool = BlockPool(4, SECRET, prefix_cache=True)
    one = computed(pool, tokens(40))
    pool.clear()
    one.forget()
    pool.check([])
    assert pool.find(tokens(40), b"", one.digests) == []


def test_check_finds_a_wrong_count() -> None:
    """Guards the guard."""
    pool = BlockPool(4, SECRET, prefix_cache=True)
    one = computed(pool, tokens(40))
    with pytest.raises(AssertionError):
        pool.check([])
    one.blocks.pop()
    with pytest.raises(AssertionError):
        pool.check([one])


@settings(max_examples=150, deadline=None)
@given(
    num_blocks=st.integers(1, 12),
    weak=st.sampled_from([None, lambda data: bytes([sum(data) % 3])]),
    actions=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2**16)), max_size=60),
)
def test_invariants_hold(
    num_blocks: int, weak: Callable[[bytes], bytes] | None, actions: list[tuple[int, int]]
) -> None:
    """Guards every invariant of the pool under random admissions, growth, commits and releases."""
    pool = BlockPool(num_blocks, SECRET, prefix_cache=True, digest=weak)
    live: list[Sequence] = []
    for action, draw in actions:
        if action <= 1:  # prompts of few kinds, so that chains meet, fork and repeat
            one = sequence(
                [draw % 2] * (1 + draw // 2 % 60) + [draw // 256 % 3] * (draw // 1024 % 30), b"s" * (draw % 2)
            )
            if pool.admit(one, spare=draw % 3):
                live.append(one)
        elif live:
            one = live[draw % len(live)]
            if action == 2:
                one.computed += draw % (one.num_left + 1)
                pool.commit(one)
            elif action == 3:
                one.tokens.append(draw % 3)
                if not pool.grow(one):
                    one.tokens.pop()
            else:
                live.remove(one)
                pool.release(one)
        pool.check(live)
    for one in live:
        pool.release(one)
    pool.check([])
    assert pool.num_free == num_blocks
