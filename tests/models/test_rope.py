"""Rope tables: as long as they need be, and the same bits however they are filled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise.config import Coordinates
from shardwise.kernels.ops import Ops
from shardwise.models import rope
from shardwise.models.config import Rope
from shardwise.models.rope import RopeTable
from shardwise.parallel.axis import Axis
from shardwise.runtime.launch import runner_spec
from shardwise.runtime.part import make_part
from tests.harness import plan_of
from tests.tiny import save_llama


def test_a_table_has_no_more_positions_than_the_cache(tmp_path: Path) -> None:
    """Guards memory: a context of millions of tokens, which a cache of 64 never reaches, took gigabytes of sines."""
    path = save_llama(tmp_path, "even", dtype=torch.float32)
    config = path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 2**24}))
    for settings, positions in (({"kv_tokens": 64}, 64), ({"kv_tokens": 64, "max_model_len": 40}, 40)):
        part = make_part(
            runner_spec(plan_of(path, "1", **settings)), Coordinates(0, 0, 0), Axis(0, 1), Ops(torch.float32)
        )
        assert part.decoder.rope is not None
        assert part.decoder.rope.cos.shape == part.decoder.rope.sin.shape == (positions, 4)


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
def test_pieces_of_a_table_are_its_bits(compute: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the answer against the length of the table: filled at once, in pieces, and as a longer one's beginning."""

    def table(positions: int) -> RopeTable:
        return RopeTable(Rope(10000.0, 14), positions, compute, torch.device("cpu"))

    whole = table(101)
    for piece in (1, 7, 100):
        monkeypatch.setattr(rope, "PIECE", piece)
        for found in (table(101), table(150)):
            assert torch.equal(found.cos[:101], whole.cos)
            assert torch.equal(found.sin[:101], whole.sin)
