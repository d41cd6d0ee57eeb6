"""A service on ranks that are only played, for what depends on how they fare and not on what they compute."""

from __future__ import annotations

from shardwise.defaults import model_defaults
from shardwise.engine import Engine
from shardwise.intake import Intake
from shardwise.replicas import Replicas
from shardwise.runtime.executor import Executor, RankFailure
from shardwise.schedule.scheduler import Scheduler
from shardwise.server.admission import Admission
from shardwise.server.config import ServerConfig
from shardwise.server.deps import Deps
from shardwise.server.metrics import Metrics
from shardwise.server.service import Service
from tests.fakes import Letters, ScriptedExecutor

KEY = "sk-one"
KEYED = {"Authorization": f"Bearer {KEY}"}


class Ranks(ScriptedExecutor):
    """Ranks that can be killed, and that become ready when they are told."""

    ready = True

    def __init__(self) -> None:
        super().__init__(lambda request, position: 97)
        self.failure: RankFailure | None = None

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure


class Stage:
    """A service on fake ranks, of which each replica's failed ones can be replaced at will."""

    def __init__(self, replicas: int = 1, restarts: bool = True) -> None:
        self.ranks = [Ranks() for _ in range(replicas)]
        self.may_start = True
        engines = [
            Engine(
                each,
                Scheduler(
                    num_blocks=16,
                    max_model_len=64,
                    max_batch_tokens=16,
                    max_chunk=16,
                    max_num_seqs=4,
                    num_in_flight=1,
                    prefix_cache=True,
                    eos=frozenset(),
                    vocab_size=128,
                    secret=b"x" * 32,
                ),
                Letters(),  # type: ignore[arg-type]
                (lambda _, at=at: self._next(at)) if restarts else None,
            )
            for at, each in enumerate(self.ranks)
        ]
        config = ServerConfig(api_keys=(KEY,))
        self.service = Service(Replicas(engines), Admission(10, 1000, 10.0), Metrics("tiny"))
        intake = Intake(Letters(), 128, frozenset())  # type: ignore[arg-type]
        self.deps = Deps(config, self.service, intake, model_defaults({}), ("tiny",), 64, 1)

    def _next(self, at: int) -> Executor:
        self.ranks[at] = Ranks()
        self.ranks[at].ready = self.may_start
        return self.ranks[at]
