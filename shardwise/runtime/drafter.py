"""The decoder of one rank that guesses tokens cheaply: another model, or the target's own layers or rounded weights.

Knows how it stands to the target's vocabulary and KV cache; which guesses are wanted or taken is decided elsewhere.
"""

from __future__ import annotations

import msgspec
from torch import Tensor

from shardwise.config import Coordinates
from shardwise.kernels.ops import Ops
from shardwise.models.batch import Batch
from shardwise.parallel.axis import Axis
from shardwise.runtime.part import Part, make_part
from shardwise.runtime.spec import RunnerSpec


class Drafter:
    """The draft decoder of ``spec.draft`` beside ``target``, this rank's part of the model; ``tp`` is its axis.

    Positions must stay below the ``max_len`` of its plan. Stages send and receive [M, ``hidden_size``].
    """

    def __init__(self, spec: RunnerSpec, coordinates: Coordinates, tp: Axis, ops: Ops, target: Part) -> None:
        draft = spec.draft
        assert draft is not None
        if draft.layers is not None:
            self.part = target.first(draft.layers)
        elif draft.model is None or draft.index is None:
            rounded = msgspec.structs.replace(spec, dtype=draft.dtype, quantize=draft.quantize, offload=draft.offload)
            self.part = make_part(rounded, coordinates, tp, ops, target.cache)
        else:
            own = msgspec.structs.replace(
                spec,
                model=draft.model,
                index=draft.index,
                dtype=draft.dtype,
                quantize=draft.quantize,
                stages=None,
                offload=draft.offload,
            )
            self.part = make_part(own, coordinates, tp, ops)
        self.hidden_size = self.part.hidden_size
        self.vocabs = self.part.shard.vocabs
        """Vocabulary rows of every tp rank, for the sampler: the draft's own, which may be more or fewer in all."""
        ours, theirs = self.part.config.vocab_size, target.config.vocab_size
        self._num_known = ours if ours < theirs else None

    def load(self) -> int:
        """Read what the target did not read; bytes. Raises LoadError."""
        return self.part.load()

    def __call__(self, received: Tensor | None, batch: Batch) -> Tensor:
        """As `Decoder`: [M, hidden] (None on the first stage) → [M, hidden].

        Ids that only the target knows are read as 0. Those that only the draft knows are the sampler's to leave out.
        """
        if self._num_known is not None:
            batch = batch._replace(ids=batch.ids.masked_fill(batch.ids >= self._num_known, 0))
        return self.part(received, batch)

    def logits(self, x: Tensor, batch: Batch) -> Tensor:
        """As `Part.logits`."""
        return self.part.logits(x, batch)
