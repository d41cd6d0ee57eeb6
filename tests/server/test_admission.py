"""The queue alone, on a clock that is turned by hand: bounds, order, fairness between keys, Retry-After."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shardwise.server.admission import Admission, Refused, Ticket
from shardwise.server.fair import MAX_IDLE


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(requests: int = 10, tokens: int = 1000, timeout: float = 60.0, keys: int = 1) -> tuple[Admission, Clock]:
    clock = Clock()
    return Admission(requests, tokens, timeout, clock, num_keys=keys), clock


def enter(queue: Admission, cost: int = 10, parts: int = 1, key: str = "", priority: int = 0) -> Ticket:
    return queue.enter(cost, parts, key=key, priority=priority)


def refusal(queue: Admission, cost: int = 10, parts: int = 1, key: str = "") -> Refused:
    with pytest.raises(Refused) as found:
        enter(queue, cost, parts, key)
    return found.value


def order(queue: Admission) -> list[Ticket]:
    """Everybody who waits, in the order in which they start; each ends before the next one starts."""
    found: list[Ticket] = []
    while taken := queue.take(1):
        for ticket in taken:
            queue.leave(ticket, ticket.cost)
        found += taken
    return found


def test_r26_full_queue_refuses_at_once() -> None:
    """R26: guards both bounds, what a refusal says, that it is quick, and that room is given back."""
    queue, _ = make(requests=4, tokens=100)
    tickets = [enter(queue) for _ in range(4)]
    assert (refusal(queue).status, refusal(queue).retry_after) == (429, 1)
    with pytest.raises(Refused, match="too many"):
        queue.check(key="")
    queue.leave(tickets.pop())
    queue.check(key="")
    tickets.append(enter(queue, 70))
    assert queue.num_open == queue.num_waiting == 4
    assert queue.waiting_tokens == 100
    queue.leave(tickets.pop())
    assert refusal(queue, 71).status == 429
    enter(queue, 70)

    large, _ = make(requests=1024, tokens=2**20)
    for number in range(1024):
        enter(large, 100, key=str(number % 7), priority=number % 3)
    large.take(100)
    took = []
    for _ in range(2000):
        began = time.thread_time()
        refusal(large, 100)
        took.append(time.thread_time() - began)
    assert sorted(took)[int(0.99 * len(took))] < 0.020


def test_r12_never_and_not_now() -> None:
    """R12: guards against telling clients to come back with what can never fit."""
    queue, _ = make(requests=4, tokens=100)
    assert (refusal(queue, 101).status, refusal(queue, 101).retry_after) == (400, None)
    assert refusal(queue, 10, parts=5).status == 400
    enter(queue, 60)
    assert refusal(queue, 41).status == 429
    assert queue.largest == (4, 100)
    shared, _ = make(requests=8, tokens=100, keys=2)
    assert shared.largest == (6, 75)
    assert refusal(shared, 76).status == 400  # the other key is sure of 25
    enter(shared, 75, key="a")
    assert refusal(shared, 1, key="a").status == 429
    enter(shared, 25, key="b")


def test_closed_queue() -> None:
    """R31: guards the drain: nobody comes in any more, whoever is in goes on."""
    queue, _ = make()
    ticket = enter(queue)
    queue.close()
    assert refusal(queue).status == 503
    assert refusal(queue).retry_after == 1
    assert queue.take(5) == [ticket]
    queue.leave(ticket)
    assert queue.num_open == 0


def test_order_by_priority_then_arrival() -> None:
    """Guards the meaning of priority: of a key's requests the lowest number first, and equal ones as they came."""
    queue, _ = make(requests=100, tokens=10_000)
    tickets = [enter(queue, priority=priority) for priority in (3, 0, 3, -1, 0, -1)]
    assert order(queue) == [tickets[at] for at in (3, 5, 1, 4, 0, 2)]


@pytest.mark.parametrize("priority", [-(2**31), 2**31 - 1])
def test_f16_priority_moves_nobody_else(priority: int) -> None:
    """F16, R26: guards against a client that puts itself before other keys, or does itself harm by modesty."""
    queue, _ = make(requests=100, tokens=10_000)
    for _ in range(10):
        enter(queue, key="loud", priority=priority)
        enter(queue, key="quiet")
    keys = [ticket.key for ticket in order(queue)]
    for end in range(1, 21):
        assert abs(keys[:end].count("loud") - keys[:end].count("quiet")) <= 1


def test_room() -> None:
    """Guards against a request of more continuations than there is ever room for, which would block all others."""
    queue, _ = make(requests=200)
    wide, small = enter(queue, parts=128), enter(queue)
    assert queue.take(0) == []
    assert queue.take(-3) == []
    assert queue.take(8) == [wide]
    assert queue.take(1) == [small]
    assert queue.num_open == 129
    assert queue.num_waiting == 0


def test_r27_queue_timeout() -> None:
    """R27: guards against a silent wait: who has waited too long is told, once; who runs is left alone."""
    queue, clock = make(timeout=5.0)
    running, late = enter(queue), enter(queue, priority=1)
    assert queue.take(1) == [running]
    clock.now += 3
    young = enter(queue)
    clock.now += 2
    assert queue.expire() == []
    clock.now += 0.1
    assert queue.expire() == [late]
    assert queue.expire() == []
    assert queue.num_open == 2
    assert order(queue) == [young]


def test_leave_is_idempotent() -> None:
    """Guards the counts: a ticket that is closed twice, or after it expired, gives its room back once."""
    queue, clock = make(timeout=1.0)
    waiting, running = enter(queue), enter(queue, priority=-1)
    queue.take(1)
    clock.now += 2
    assert queue.expire() == [waiting]
    for ticket in (waiting, running, waiting, running):
        queue.leave(ticket, 3)
    assert (queue.num_open, queue.num_waiting, queue.waiting_tokens) == (0, 0, 0)


class Model(RuleBasedStateMachine):
    """R26: any sequence of calls: bounds hold, counts are right, and every ticket leaves once and in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.clock = make(requests=12, tokens=120, timeout=10.0, keys=3)
        self.waiting: list[Ticket] = []
        self.running: list[Ticket] = []

    @rule(
        cost=st.integers(1, 90),
        parts=st.integers(1, 5),
        key=st.sampled_from("abc"),
        priority=st.sampled_from([-1, 0, 7]),
    )
    def enter(self, cost: int, parts: int, key: str, priority: int) -> None:
        tickets = [*self.waiting, *self.running]
        own = [ticket for ticket in tickets if ticket.key == key]
        sure = sum(ticket.parts for ticket in own) + parts <= 2 and sum(ticket.cost for ticket in own) + cost <= 20
        status = 0
        try:
            self.waiting.append(self.queue.enter(cost, parts, key=key, priority=priority))
        except Refused as refused:
            status = refused.status
        assert (status == 400) == (cost > 80)
        assert not (sure and status), "a key is sure of its part"

    @rule(room=st.integers(-1, 6))
    def take(self, room: int) -> None:
        for ticket in self.queue.take(room):
            assert room > 0
            room -= ticket.parts
            own = [other for other in self.waiting if other.key == ticket.key]
            assert ticket is min(own, key=lambda other: (other.priority, other.number)), "not in its turn"
            self.waiting.remove(ticket)
            self.running.append(ticket)
        assert room <= 0 or not self.waiting, "there was room, and somebody waits"

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data(), tokens=st.integers(0, 100))
    def leave(self, data: st.DataObject, tokens: int) -> None:
        ticket = data.draw(st.sampled_from([*self.waiting, *self.running]))
        self.queue.leave(ticket, tokens)
        (self.waiting if ticket in self.waiting else self.running).remove(ticket)
        self.queue.leave(ticket, tokens)

    @rule(seconds=st.floats(0, 8))
    def expire(self, seconds: float) -> None:
        self.clock.now += seconds
        late = [ticket for ticket in self.waiting if self.clock.now - ticket.entered > 10.0]
        assert self.queue.expire() == late
        self.waiting = [ticket for ticket in self.waiting if ticket not in late]

    @invariant()
    def counts(self) -> None:
        tickets = [*self.waiting, *self.running]
        assert self.queue.num_open == sum(ticket.parts for ticket in tickets) <= 12
        assert sum(ticket.cost for ticket in tickets) <= 120
        assert self.queue.num_waiting == sum(ticket.parts for ticket in self.waiting)
        assert self.queue.waiting_tokens == sum(ticket.cost for ticket in self.waiting)
        assert 1 <= self.queue.retry_after <= 10

    def teardown(self) -> None:
        for ticket in [*self.waiting, *self.running]:
            self.queue.leave(ticket)
        self.queue.take(100)
        assert (self.queue.num_open, self.queue.waiting_tokens) == (0, 0)
        assert not self.queue._queue._lanes  # all is forgotten
        assert not self.queue._queue._idle


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100), st.floats(0, 1)), min_size=30, max_size=90))
def test_keys_that_always_wait_get_the_same(requests: list[tuple[str, int, float]]) -> None:
    """F16: guards fairness in tokens: between keys that always wait it is off by one request of each at most, also
    where requests need less than they might have."""
    queue, _ = make(1000, 100_000)
    ends = {enter(queue, cost, key=key): int(cost * part) for key, cost, part in requests}
    left = {key: sum(ticket.key == key for ticket in ends) for key in "abc"}
    largest = {key: max((ticket.cost for ticket in ends if ticket.key == key), default=0) for key in "abc"}
    served: dict[str, int] = defaultdict(int)
    while all(left.values()):
        (ticket,) = queue.take(1)
        queue.leave(ticket, ends[ticket])
        served[ticket.key] += ends[ticket]
        left[ticket.key] -= 1
        for one, other in (("a", "b"), ("b", "c"), ("c", "a")):
            assert abs(served[one] - served[other]) <= largest[one] + largest[other]


@pytest.mark.parametrize("runs", [False, True])
def test_idleness_earns_nothing(runs: bool) -> None:
    """F16: guards against a key that saves up turns while it asks for nothing more, and then shuts out the others."""
    queue, _ = make(1000, 100_000)
    if runs:
        enter(queue, key="late")
        queue.take(1)
    for _ in range(50):
        enter(queue, key="busy")
    for _ in range(20):
        queue.leave(queue.take(1)[0], 10)
    for _ in range(20):
        enter(queue, key="late")
    keys = [ticket.key for ticket in order(queue)][:20]
    assert abs(keys.count("late") - keys.count("busy")) <= 1


@pytest.mark.parametrize("num_keys", [3, 10 * MAX_IDLE])
def test_nobody_starves(num_keys: int) -> None:
    """Guards against newcomers, known or ever new, that go on passing somebody who has had much; and against memory
    for each key that ever was."""
    queue, _ = make(1000, 100_000)
    enter(queue, 500, key="greedy")
    queue.take(1)
    patient = enter(queue, 50, key="greedy")
    for number in range(20 * MAX_IDLE):
        enter(queue, 50, key=str(number % num_keys))
        (ticket,) = queue.take(1)
        if ticket is patient:
            break
        queue.leave(ticket, 50)
        assert len(queue._queue._lanes) <= MAX_IDLE + 3
    else:
        raise AssertionError("it never had its turn")


def simulate(load: dict[str, float], num_keys: int, solo: bool = False) -> float:
    """Tokens that "victim" is served within 300 s by a server with 8 places of 100 tokens/s each, where "flood" tries
    at each moment to fill the queue. ``load``: the victim's part of what the server can do, and both keys' costs."""
    queue, clock = make(requests=64, tokens=64_000, timeout=30.0, keys=num_keys)
    cost = int(load["cost"])
    gap = cost / (800 * load["part"])
    ends: list[tuple[float, int, Ticket]] = []
    arrivals = [100.0 + gap * at for at in range(int(300 / gap))]
    served = 0
    while clock.now < 400.0:
        clock.now = min(ends[0][0] if ends else 1e9, arrivals[0] if arrivals else 1e9)
        while ends and ends[0][0] <= clock.now:
            ticket = heapq.heappop(ends)[2]
            queue.leave(ticket, ticket.cost)
            served += ticket.cost * (ticket.key == "victim")
        queue.expire()
        if not solo:
            with suppress(Refused):
                while True:
                    enter(queue, int(load["flood"]), key="flood")
        if arrivals and arrivals[0] <= clock.now:
            arrivals.pop(0)
            with suppress(Refused):  # it is not served then, and that counts
                enter(queue, cost, key="victim")
        for ticket in queue.take(8 - len(ends)):
            heapq.heappush(ends, (clock.now + ticket.cost / 100, ticket.number, ticket))
    return served


@settings(max_examples=15, deadline=None)
@given(part=st.floats(0.02, 0.1), cost=st.integers(100, 800), flood=st.integers(100, 800))
def test_f16_a_flood_of_one_key_does_not_harm_another(part: float, cost: int, flood: int) -> None:
    """F16: guards a key that asks for 10 % at most of what the server can do: it keeps 90 % of what it gets alone."""
    load = {"part": part, "cost": cost, "flood": flood}
    assert simulate(load, num_keys=2) >= 0.9 * simulate(load, num_keys=2, solo=True)


def test_f16_would_fail_without_a_part_of_the_queue() -> None:
    """Guards the test above: where no part of the queue is kept for it, the victim finds it full."""
    load = {"part": 0.1, "cost": 400, "flood": 100}
    assert simulate(load, num_keys=1) < 0.9 * simulate(load, num_keys=1, solo=True)


@settings(max_examples=40, deadline=None)
@given(
    costs=st.lists(st.integers(50, 400), min_size=60, max_size=60),
    places=st.integers(1, 8),
    used=st.floats(0.2, 1.0),
    pause=st.floats(0, 1000),
)
def test_retry_after_is_true(costs: list[int], places: int, used: float, pause: float) -> None:
    """F15: guards Retry-After: within a half of the time in which what is there is done, also where requests need less
    than they might have, and after a pause. There are so many of them that the last to end alone does not matter."""
    costs *= 4
    queue, clock = make(1000, 240_000, timeout=1e6)
    ends: list[tuple[float, int, Ticket]] = []

    def start() -> None:
        for ticket in queue.take(places - len(ends)):
            heapq.heappush(ends, (clock.now + ticket.cost * used / 10, ticket.number, ticket))

    def work() -> bool:
        if not ends:
            return False
        clock.now, _, ticket = heapq.heappop(ends)
        queue.leave(ticket, int(ticket.cost * used))
        start()
        return True

    for _ in range(2):
        for cost in costs:
            enter(queue, cost)
        start()
        for _ in costs[:120]:
            work()
        began, told = clock.now, queue.retry_after
        while work():
            pass
        assert 0.5 * (clock.now - began) <= told <= 1.5 * (clock.now - began) + 1
        clock.now += pause


def test_retry_after_before_anything_was_measured() -> None:
    """F15: guards the first minutes: there is an answer, and none beyond the queue's own time limit."""
    queue, clock = make(10, 10_000, timeout=20.0)
    assert queue.retry_after == 1
    for _ in range(10):
        enter(queue, 1000)
    assert refusal(queue).retry_after == 1
    (ticket,) = queue.take(1)
    clock.now += 50
    queue.leave(ticket, 1000)
    enter(queue, 1000)
    assert refusal(queue).retry_after == 20
