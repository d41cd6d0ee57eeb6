"""Which layouts fill the hosts that torchrun has started. Arithmetic only."""

from __future__ import annotations

from shardwise.config import Layout
from shardwise.models.config import ModelConfig, max_tp
from shardwise.world import World


def check_world(world: World, config: ModelConfig, layout: Layout, whole: bool) -> None:
    """ValueError unless the layout fills the world; to fit in it is enough where it need not be the ``whole``."""
    if layout.world_size > world.size or (whole and layout.world_size != world.size):
        sizes = [size for size in range(1, world.size + 1) if world.size % size == 0]
        possible = [
            Layout(world.size // (tp * pp), tp, pp)
            for tp in sizes
            for pp in sizes
            if world.size % (tp * pp) == 0 and tp <= max_tp(config) and pp <= config.num_layers
        ]
        near = sorted(possible, key=lambda each: (abs(each.tp - world.local_size), each.dp, each.pp))[:4]
        raise ValueError(
            f"layout {layout} has {layout.world_size} ranks, and torchrun started {world.size} processes, "
            f"{world.local_size} on each of {world.hosts} hosts: the nearest layouts of {world.size} ranks that this "
            f"model allows are {', '.join(map(str, near))}"
        )
