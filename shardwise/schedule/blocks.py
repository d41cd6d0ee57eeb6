"""Which KV block belongs to whom, and which hold content worth reusing.

Knows neither the order in which sequences run nor where the KV lies.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from shardwise.config import BLOCK
from shardwise.schedule.sequence import Sequence


class _Content(NamedTuple):
    """What a full block holds. KV depends on all tokens before it, so the block before is part of its identity."""

    digest: bytes
    parent: int | bytes
    """The block before it, or the salt for the first block of a sequence."""
    tokens: list[int]


class BlockPool:
    """``num_blocks`` blocks of BLOCK tokens, each free, cached (free, but its content can be reused) or used.

    A full block is found by a chain of keyed hashes and taken only if its tokens and the block before it are equal
    too, so a collision costs a hit and never shares a wrong block. ``secret`` (1 to 64 bytes) keys the hash, so that
    nobody outside can aim at collisions; ``digest`` replaces the hash in tests. A sequence holds whole chains and
    gives them up tail first: hence a cached block is always evicted before the one that it continues, and the number
    of a parent block can't go stale. All choices are deterministic.
    """

    def __init__(
        self, num_blocks: int, secret: bytes, prefix_cache: bool, digest: Callable[[bytes], bytes] | None = None
    ) -> None:
        assert num_blocks >= 1, num_blocks
        assert 1 <= len(secret) <= 64, "a keyed hash needs a secret of 1 to 64 bytes"
        self.num_blocks = num_blocks
        self.num_queried = self.num_hits = 0
        """Tokens of admitted sequences, and those of them whose KV was found."""
        self._prefix_cache = prefix_cache
        self._hash = digest or (lambda data: hashlib.blake2b(data, digest_size=16, key=secret).digest())
        self.clear()

    def clear(self) -> None:
        """Forget everything; sequences must forget their blocks too."""
        self._refs = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._contents: dict[int, _Content] = {}
        self._index: dict[bytes, int] = {}
        self._drafted: set[int] = set()  # blocks that hold the draft model's KV of their tokens too

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._free) + len(self._cached)

    def find(self, tokens: list[int], salt: bytes, digests: list[bytes]) -> list[int]:
        """Blocks that hold the start of ``tokens``, such that at least one token is left to compute.

        ``digests`` is the caller's memory of the chain, empty at first; it is extended as needed.
        """
        found: list[int] = []
        parent: int | bytes = salt
        for start in range(0, len(tokens) - BLOCK if self._prefix_cache else 0, BLOCK):
            block = self._index.get(self._digest(len(found), tokens, salt, digests))
            if block is None or self._contents[block][1:] != (parent, tokens[start : start + BLOCK]):
                break
            found.append(block)
            parent = block
        return found

    def admit(self, sequence: Sequence, spare: int) -> bool:
        """Give a sequence without blocks enough for all its tokens, reusing what is cached: ``computed`` jumps.

        It jumps over no token of which something is still to be told. False, and nothing is changed, if
        fewer than ``spare`` free blocks would be left.
        """
        assert not sequence.blocks
        found = self.find(sequence.tokens, sequence.request.salt, sequence.digests)
        found = found[: sequence.reusable // BLOCK]
        missing = -(-len(sequence.tokens) // BLOCK) - len(found)
        if missing + sum(self._refs[block] == 0 for block in found) + spare > self.num_free:
            return False
        for block in found:
            self._hold(block)
        self.num_queried += len(sequence.tokens)
        self.num_hits += len(found) * BLOCK
        sequence.blocks = found + [self._take() for _ in range(missing)]
        sequence.committed = len(found)
        sequence.computed = len(found) * BLOCK
        sequence.drafted = (
            next((at for at, block in enumerate(found) if block not in self._drafted), len(found)) * BLOCK
        )
        return True

    def grow(self, sequence: Sequence, drafts: int = 0) -> bool:
        """See to it that its blocks have room for all its tokens and so many drafts.

        False if a block is missing and none is free.
        """
        while len(sequence.blocks) * BLOCK < len(sequence.tokens) + drafts:
            if not self.num_free:
                return False
            sequence.blocks.append(self._take())
        return True

    def commit(self, sequence: Sequence) -> None:
        """Let others reuse the full blocks whose KV exists. Not for a sequence in flight.

        A block whose content is already known from another sequence is given back and that one held instead.
        """
        if not self._prefix_cache:
            return
        for index in range(sequence.committed, sequence.computed // BLOCK):
            block = sequence.blocks[index]
            digest = self._digest(index, sequence.tokens, sequence.request.salt, sequence.digests)
            parent = sequence.blocks[index - 1] if index else sequence.request.salt
            content = _Content(digest, parent, sequence.tokens[index * BLOCK : (index + 1) * BLOCK])
            known = self._index.setdefault(digest, block)
            if known == block:
                self._contents[block] = content
            elif self._contents[known] == content:
                self._hold(known)
                self._drop(block)
                sequence.blocks[index] = known
                if known not in self._drafted:
                    sequence.drafted = min(sequence.drafted, index * BLOCK)
            else:
                return  # a collision: this block and all that continue it stay private
            sequence.committed += 1

    def mark(self, sequence: Sequence) -> None:
        """Remember of which of its committed blocks the draft model's KV exists."""
        self._drafted.update(sequence.blocks[: min(sequence.committed, sequence.drafted // BLOCK)])

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence; what it committed stays cached. It forgets its KV."""
        for block in reversed(sequence.blocks):
            self._drop(block)
        sequence.forget()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert every invariant; ``sequences`` are all that hold blocks. Costs time in proportion to their tokens."""
        refs: Counter[int] = Counter()
        for sequence in sequences:
            assert len(set(sequence.blocks)) == len(sequence.blocks), sequence
            assert sequence.committed <= sequence.computed // BLOCK <= len(sequence.blocks), sequence
            refs.update(sequence.blocks)
            parent: int | bytes = sequence.request.salt
            for index, block in enumerate(sequence.blocks):
                if index < sequence.committed:
                    tokens = sequence.tokens[index * BLOCK : (index + 1) * BLOCK]
                    assert self._contents[block][1:] == (parent, tokens), (sequence, index)
                else:
                    assert self._refs[block] == 1, (sequence, index)
                    assert block not in self._contents, (sequence, index)
                parent = block
        assert self._refs == [refs[block] for block in range(self.num_blocks)]
        assert sorted([*self._free, *self._cached, *refs]) == list(range(self.num_blocks))
        assert self._contents.keys() >= self._cached.keys()
        assert self._contents.keys().isdisjoint(self._free)
        assert self._index == {content.digest: block for block, content in self._contents.items()}
        age = {block: place for place, block in enumerate(self._cached)}
        for block, content in self._contents.items():
            if isinstance(content.parent, int):
                assert content.parent in self._contents, (block, content)
                assert content.parent not in age or age.get(block, self.num_blocks) < age[content.parent], block

    def _digest(self, index: int, tokens: list[int], salt: bytes, digests: list[bytes]) -> bytes:
        if not digests:
            digests.append(self._hash(salt))
        for number in range(len(digests) - 1, index + 1):
            words = array("q", tokens[number * BLOCK : (number + 1) * BLOCK])
            digests.append(self._hash(digests[number] + words.tobytes()))
        return digests[index + 1]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._index[self._contents.pop(block).digest]
        self._refs[block] = 1
        self._drafted.discard(block)
        return block

    def _hold(self, block: int) -> None:
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def _drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if block in self._contents:
                self._cached[block] = None
            else:
                self._free.append(block)
