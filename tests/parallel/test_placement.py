"""Placement arithmetic: runs cover everything once, and the tree sums alike however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.parallel.placement import Run, Tree, split


@given(st.integers(0, 200), st.integers(1, 20))
def test_even_split_covers_once(count: int, parts: int) -> None:
    """Guards against a unit owned twice or by nobody, and against shares that differ by more than one."""
    runs = split(count, parts)
    assert [unit for run in runs for unit in range(*run)] == list(range(count))
    assert max(run.size for run in runs) - min(run.size for run in runs) <= 1


@given(st.integers(1, 100), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_weighted_split_covers_once(count: int, weights: list[float]) -> None:
    """Guards --split: each rank gets work where there is enough, in proportion to its weight."""
    runs = split(count, len(weights), weights)
    assert [unit for run in runs for unit in range(*run)] == list(range(count))
    if count >= len(weights):
        assert min(run.size for run in runs) >= 1


def test_weights_mean_shares() -> None:
    """Guards the meaning of --split 3,1."""
    assert split(12, 2, [3, 1]) == [Run(0, 9), Run(9, 12)]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    count = draw(st.integers(1, 40))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=6))) if count > 1 else []
    bounds = [0, *cuts, count]
    return Tree(tuple(Run(*pair) for pair in zip(bounds, bounds[1:], strict=False)))


def reduce(items: list[str], merges: list[int] | tuple[int, ...]) -> list[str]:
    """Run an addition program on names, writing each sum as it is bracketed."""
    stack: list[str] = []
    for item, count in zip(items, merges, strict=True):
        stack.append(item)
        for _ in range(count):
            right = stack.pop()
            stack.append(f"({stack.pop()}+{right})")
    return stack


@given(trees())
def test_brackets_do_not_depend_on_the_cut(tree: Tree) -> None:
    """Guards the promise at its root: every cut of the chunks writes the very same bracketed sum."""
    count = tree.parts[-1].stop
    chunks = [str(chunk) for chunk in range(count)]
    (whole,) = reduce(chunks, Tree((Run(0, count),)).merges(0))
    nodes = []
    for rank, run in enumerate(tree.parts):
        own = reduce(chunks[run.start : run.stop], tree.merges(rank))
        assert len(own) == len(tree.nodes(rank))
        nodes += own
    assert reduce(nodes, tree.finish) == [whole]


@given(trees(), st.sets(st.integers(1, 39), max_size=8))
def test_pieces_of_a_rank_join_to_its_nodes(tree: Tree, cuts: set[int]) -> None:
    """Guards experts: a rank that sums piece by piece, and then the pieces, writes the brackets of the whole run."""
    chunks = [str(chunk) for chunk in range(tree.parts[-1].stop)]
    for rank, run in enumerate(tree.parts):
        bounds = [run.start, *sorted(cut for cut in cuts if run.start < cut < run.stop), run.stop]
        pieces = [Run(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
        sums = [node for piece in pieces for node in reduce(chunks[slice(*piece)], tree.program(piece))]
        leaves = [node for piece in pieces for node in tree.within(piece)]
        assert reduce(sums, tree.program(run, leaves)) == reduce(chunks[slice(*run)], tree.merges(rank))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_equal_halves_hold_one_node(ranks: int) -> None:
    """Guards the cost: where ranks own equal power-of-two shares of 24 chunks, each sends a single partial sum."""
    tree = Tree(tuple(split(24, ranks)))
    assert [len(tree.nodes(rank)) for rank in range(ranks)] == [1] * ranks
