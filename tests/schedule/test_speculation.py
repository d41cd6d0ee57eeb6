"""The choice of drafts in simulated worlds: it nears the best there is, and never costs much where there is none."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.features import MAX_DRAFTS, Speculation
from shardwise.schedule.speculation import EVERY, EXPERIMENTS, Drafting, Speculator, Tally

DRAFT = Speculation("draft", model="small")
NGRAM = Speculation("ngram")


@dataclass
class World:
    """Steps cost ``fixed + row * rows`` seconds, draft steps the part ``draft`` of that and a hundredth more."""

    fixed: float
    row: float
    draft: float
    noise: float = 0.1
    """Standard deviation of the logarithm of what is measured."""
    slow: float = 0.0
    """The part of measurements that is ten times too high."""

    def target(self, rows: int) -> float:
        return self.fixed + self.row * rows

    def drafting(self, rows: int) -> float:
        return self.draft * self.target(rows) + 0.01 * self.fixed

    def measured(self, seconds: float, chance: random.Random) -> float:
        return seconds * math.exp(chance.gauss(0, self.noise)) * (10 if chance.random() < self.slow else 1)

    def plain(self, num_sequences: int) -> float:
        """Tokens per second without drafts."""
        return num_sequences / self.target(num_sequences)

    def best(self, rate: float, num_sequences: int) -> float:
        """Tokens per second with the best fixed number of drafts, none included, by the formula."""
        return max(
            num_sequences
            * sum(rate**place for place in range(k + 1))
            / (self.target(num_sequences * (1 + k)) + k * self.drafting(num_sequences))
            for k in range(MAX_DRAFTS + 1)
        )


GPU = World(1, 0.002, 0.2)
CPU = World(0.85, 0.15, 0.2)
MIDDLE = World(1, 0.05, 0.05)
HALF = World(1, 0.05, 0.5)
COSTLY = World(1, 0.05, 0.9)
FULL = World(0.5, 0.5, 0.2)
"""A draft costs more than there is to gain unless nearly all are right."""

Rate = Callable[[int], float]


@dataclass
class Run:
    """Sequences side by side; ``rates[i](n)`` is the acceptance of sequence i when it has n tokens.

    One that reaches ``limit`` tokens makes room for a new one of its kind.
    """

    world: World
    rates: list[Rate]
    speculator: Speculator
    limit: int = 10**9
    seed: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.draftings = [self.speculator.begin() for _ in self.rates]
        self.lengths = [0] * len(self.rates)
        self.num_tokens = 0
        self.seconds = 0.0
        self.drafts: list[list[int]] = []
        """Of each round, the number for each sequence."""

    def round(self) -> None:
        world, speculator, size = self.world, self.speculator, len(self.rates)
        wanted = [speculator.length(drafting, size, MAX_DRAFTS) for drafting in self.draftings]
        self.drafts.append(wanted)
        for place in range(max(wanted)):
            rows = sum(count > place for count in wanted)
            seconds = world.drafting(rows)
            self.seconds += seconds
            speculator.observe(True, rows, rows, world.measured(seconds, self.chance))
        rows = size + sum(wanted)
        self.seconds += world.target(rows)
        speculator.observe(False, size, rows, world.measured(world.target(rows), self.chance))
        for place, count in enumerate(wanted):
            rate = self.rates[place](self.lengths[place])
            accepted = next((n for n in range(count) if self.chance.random() >= rate), count)
            speculator.record(self.draftings[place], count, accepted)
            self.num_tokens += accepted + 1
            self.lengths[place] += accepted + 1
            if self.lengths[place] >= self.limit:
                self.draftings[place], self.lengths[place] = speculator.begin(), 0

    def until(self, num_tokens: int) -> float:
        """Run on until there are so many tokens; tokens per second since the call."""
        tokens, seconds = self.num_tokens, self.seconds
        while self.num_tokens < num_tokens:
            self.round()
        return (self.num_tokens - tokens) / (self.seconds - seconds)


def always(rate: float) -> Rate:
    return lambda _: rate


def mean_speed(world: World, rates: list[Rate], num_tokens: int, num_seeds: int = 4, limit: int = 10**9) -> float:
    runs = [Run(world, rates, Speculator(DRAFT), limit, seed) for seed in range(num_seeds)]
    return sum(run.until(num_tokens * len(rates)) for run in runs) / num_seeds


# The tally


@given(st.lists(st.integers(0, 16).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))))
def test_tally(rounds: list[tuple[int, int]]) -> None:
    """Guards the histogram of acceptance: every round with drafts once, none without, and the sums."""
    tally, halves = Tally(), (Tally(), Tally())
    for place, (proposed, accepted) in enumerate(rounds):
        tally.add(proposed, accepted)
        halves[place % 2].add(proposed, accepted)
    kept = [accepted for proposed, accepted in rounds if proposed]
    assert tally.rounds == [kept.count(number) for number in range(max(kept, default=-1) + 1)]
    assert (tally.proposed, tally.accepted) == (sum(proposed for proposed, _ in rounds), sum(kept))
    assert tally.rate == (sum(kept) / tally.proposed if tally.proposed else 0.0)
    assert halves[0] + halves[1] == tally
    assert tally.document() == {
        "rounds": tally.rounds,
        "proposed": tally.proposed,
        "accepted": tally.accepted,
        "rate": tally.rate,
    }


def test_tallies_of_requests_and_engine() -> None:
    """Guards against outcomes booked on another request, or missing in the engine's sum."""
    speculator = Speculator(DRAFT)
    one, other = speculator.begin(), speculator.begin()
    speculator.record(one, 3, 2)
    speculator.record(other, 2, 0)
    speculator.record(other, 0, 0)
    assert one.tally == Tally([0, 0, 1], 3, 2)
    assert other.tally == Tally([1], 2, 0)
    assert speculator.tally == Tally([1, 0, 1], 5, 2)


# Lengths


@pytest.mark.parametrize("text", ["draft=small,k=5", "self,k=5", "ngram,k=5"])
def test_fixed_number(text: str) -> None:
    """Guards a number that the user has fixed: it is never adapted, however bad the drafts and however dear."""
    speculator = Speculator(Speculation.parse(text))
    drafting = speculator.begin()
    for _ in range(50):
        assert [speculator.length(drafting, 4, most) for most in (-1, 0, 3, 5, 16)] == [0, 0, 3, 5, 5]
        speculator.record(drafting, 5, 0)
        speculator.observe(False, 4, 24, 100.0)
        speculator.observe(False, 4, 4, 1.0)


@given(st.data())
def test_lengths_are_within_bounds(data: st.DataObject) -> None:
    """Guards the scheduler's budget: whatever was reported, no more drafts than there is room for, and none below 0."""
    speculator = Speculator(data.draw(st.sampled_from([DRAFT, Speculation("self", layers=2)])))
    draftings = [speculator.begin() for _ in range(3)]
    rounds = st.tuples(st.integers(0, 2), st.integers(1, 300), st.integers(-2, 20), st.floats(0, 1), st.floats(0, 1e3))
    for place, size, most, luck, seconds in data.draw(st.lists(rounds, max_size=40)):
        count = speculator.length(draftings[place], size, most)
        assert 0 <= count <= max(0, min(most, MAX_DRAFTS))
        speculator.record(draftings[place], count, round(luck * count))
        if count:
            speculator.observe(True, size, size, seconds * luck)
        speculator.observe(False, size, size * (1 + count), seconds)


def test_first_rounds() -> None:
    """Guards the start: a few drafts while no step was timed, also if no duration is ever reported (or all are 0)."""
    speculator = Speculator(DRAFT)
    drafting = speculator.begin()
    for _ in range(20):
        assert speculator.length(drafting, 1, 16) == 3
        assert speculator.length(drafting, 1, 2) == 2
        speculator.observe(True, 1, 1, 0.0)
        speculator.observe(False, 1, 4, 0.0)


def test_same_reports_same_choices() -> None:
    """Guards against a clock or a random number inside: two engines that hear the same choose the same."""
    runs = [Run(CPU, [always(0.8), always(0.3)], Speculator(DRAFT)) for _ in range(2)]
    for run in runs:
        run.until(600)
    assert runs[0].drafts == runs[1].drafts
    assert len({count for counts in runs[0].drafts for count in counts}) > 2


# One sequence


@pytest.mark.parametrize("rate", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("world", [GPU, CPU, MIDDLE], ids=["gpu", "cpu", "middle"])
def test_nears_the_optimum(world: World, rate: float) -> None:
    """Guards the gain: at least 95 % of the speed of the best fixed number of drafts, found without being told."""
    assert mean_speed(world, [always(rate)], 5000, num_seeds=3) >= 0.95 * world.best(rate, 1)


@pytest.mark.parametrize("world", [GPU, CPU, MIDDLE, COSTLY, FULL], ids=["gpu", "cpu", "middle", "costly", "full"])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_costs_little_where_it_does_not_pay(world: World, rate: float) -> None:
    """Guards against slower output with speculation than without: 5 % at most over 200 tokens, 3 % over 1000."""
    assert mean_speed(world, [always(rate)], 200) >= 0.95 * world.plain(1)
    assert mean_speed(world, [always(rate)], 1000) >= 0.97 * world.plain(1)


def test_probes_become_rare() -> None:
    """Guards the long run: without hope, 20 000 tokens see a few dozen drafts and lose less than half a percent."""
    run = Run(CPU, [always(0.0)], Speculator(DRAFT))
    assert run.until(20_000) >= 0.995 * CPU.plain(1)
    assert 5 <= run.speculator.tally.proposed <= 60


@pytest.mark.parametrize("world", [GPU, CPU, MIDDLE, HALF], ids=["gpu", "cpu", "middle", "half"])
def test_comes_back_when_acceptance_rises(world: World) -> None:
    """Guards against off for ever: after 600 tokens of prose a copy begins, and is found by a probe before long."""
    rise: Rate = lambda length: 0.05 if length < 600 else 0.9  # noqa: E731
    runs = [Run(world, [rise], Speculator(DRAFT), seed=seed) for seed in range(4)]
    for run in runs:
        run.until(600)
    assert sum(run.until(2000) for run in runs) / 4 >= 0.82 * world.best(0.9, 1)


def test_success_makes_probes_frequent_again() -> None:
    """Guards against a wait that only grows: after a copy was found late, the next one is found early."""
    rate: Rate = lambda length: 0.9 if 30_000 < length < 36_000 or length > 36_400 else 0.0  # noqa: E731
    waits = []
    for seed in range(3):
        run = Run(HALF, [rate], Speculator(DRAFT), seed=seed)
        run.until(36_400)
        before = len(run.drafts)
        run.until(37_800)
        waits.append(next(place for place, counts in enumerate(run.drafts[before:]) if counts[0] > 1))
    assert sorted(waits)[1] <= 200


@pytest.mark.parametrize("period", [50, 150])
def test_follows_changing_text(period: int) -> None:
    """Guards text that copies in parts: as good as the best fixed number, which suits neither part, or nearly."""
    rate: Rate = lambda length: 0.9 if length // period % 2 == 0 else 0.1  # noqa: E731
    for world in (GPU, CPU, MIDDLE):
        fixed = []
        for k in range(1, 9):
            run = Run(world, [rate], Speculator(Speculation("draft", model="small", k=k)))
            fixed.append(run.until(1200))
        assert mean_speed(world, [rate], 1200) >= 0.97 * max(world.plain(1), *fixed)


@pytest.mark.parametrize("rate", [0.0, 0.9])
def test_noise_and_slow_steps(rate: float) -> None:
    """Guards against a busy machine: measurements off by a quarter, and one in thirty ten times too high."""
    for world in (GPU, CPU):
        noisy = World(world.fixed, world.row, world.draft, noise=0.25, slow=0.03)
        assert mean_speed(noisy, [always(rate)], 1500) >= 0.93 * world.best(rate, 1)


def test_plain_rounds_are_measured_too() -> None:
    """Guards against comparing with a guess: where rows are all that costs, free drafts of which most are right gain
    nothing, and that shows only beside rounds without drafts: one at once, and one now and then while it pays."""
    run = Run(World(0.001, 1.0, 0.0), [always(0.85)], Speculator(DRAFT))
    run.until(300)
    assert run.until(1000) >= 0.98 * run.world.plain(1)
    run = Run(MIDDLE, [always(0.95)], Speculator(DRAFT))
    run.until(3000)
    plain = [place for place, counts in enumerate(run.drafts) if counts == [0]]
    assert plain[0] == 1
    assert 4 <= len(plain) <= 0.03 * len(run.drafts)
    assert max(later - place for place, later in zip(plain, plain[1:], strict=False)) <= 130


def test_no_leaps() -> None:
    """Guards against a round of sixteen drafts because of a cost that was foretold wrongly: the number only doubles."""
    run = Run(World(1, 0.0005, 0.01), [always(1.0)], Speculator(DRAFT))
    run.until(300)
    deepest = 3
    for (count,) in run.drafts:
        assert count <= 2 * deepest
        deepest = max(deepest, count)
    assert deepest == MAX_DRAFTS


def test_few_experiments() -> None:
    """Guards against experiments for ever: where free rows would pay and dear ones would not, a few rounds decide."""
    run = Run(FULL, [always(0.6)], Speculator(DRAFT))
    run.until(300)
    assert 1 < sum(counts[0] > 0 for counts in run.drafts) <= EXPERIMENTS + 300 // EVERY + 8


# Several sequences


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_a_batch_nears_the_optimum(rate: float) -> None:
    """Guards the gain of a batch, whose first rounds must tell how little rows cost: at least 92 % of the best."""
    assert mean_speed(World(1, 0.002, 0.05), [always(rate)] * 8, 400, limit=400) >= 0.92 * World(1, 0.002, 0.05).best(
        rate, 8
    )


def test_more_sequences_fewer_drafts() -> None:
    """Guards the load: rows that cost nothing for one sequence cost for many, so the number of drafts goes down."""
    usual = []
    for size in (1, 8, 64):
        run = Run(World(1, 0.06, 0.05), [always(0.8)] * size, Speculator(DRAFT), limit=300)
        run.until(200 * size)
        late = sorted(count for counts in run.drafts[-20:] for count in counts)
        usual.append(late[len(late) // 2])
    assert usual[0] >= 3
    assert usual[0] > usual[1] > usual[2] == 0


def test_each_request_by_its_own_acceptance() -> None:
    """Guards against one rate for all: of two requests the copying one has drafts and the other one hardly any."""
    run = Run(MIDDLE, [always(0.95), always(0.0)], Speculator(DRAFT))
    run.until(1500)
    late = run.drafts[len(run.drafts) // 2 :]
    copying, writing = (sum(counts[place] for counts in late) / len(late) for place in (0, 1))
    assert copying >= 5
    assert writing <= 0.2


def test_one_who_copies_does_not_hold_up_the_others() -> None:
    """Guards seven sequences against the draft steps of the eighth: those pay for all together, not for one alone."""
    world = World(1, 0.005, 0.2)
    rates = [always(0.9), *[always(0.0)] * 7]
    assert mean_speed(world, rates, 400, limit=300) >= 0.94 * world.plain(8)
    assert mean_speed(world, [always(0.9)] * 8, 400, limit=300) >= 0.9 * world.best(0.9, 8)


def test_many_short_requests_do_not_each_try() -> None:
    """Guards servers of short requests: what one has learnt spares the next its own exploration."""
    run = Run(CPU, [always(0.0)], Speculator(DRAFT), limit=20)
    assert run.until(6000) >= 0.98 * CPU.plain(1)
    assert run.speculator.tally.proposed <= 40


@pytest.mark.parametrize(("world", "size"), [(CPU, 32), (HALF, 8), (HALF, 32)], ids=["cpu 32", "half 8", "half 32"])
def test_batches_of_new_requests(world: World, size: int) -> None:
    """Guards a full server at its start: requests learn together and lose little, even if they gain nothing."""
    for rate in (0.0, 0.3, 0.6):
        speed = mean_speed(world, [always(rate)] * size, 200, num_seeds=2, limit=200)
        assert speed >= 0.95 * world.plain(size)


# Prompt lookup


def write(
    speculator: Speculator, drafting: Drafting, prompt: list[int], text: list[int], world: World = CPU
) -> tuple[list[int], float]:
    """Let a request write ``text``; the number of drafts of each round, and the seconds."""
    tokens, counts, seconds = list(prompt), [], 0.0
    end = len(prompt) + len(text)
    while len(tokens) < end:
        place = len(tokens) - len(prompt)
        most = speculator.length(drafting, 1, min(MAX_DRAFTS, end - len(tokens) - 1))
        drafts = speculator.propose(drafting, tokens, most)
        assert len(drafts) <= most
        accepted = next((n for n, draft in enumerate(drafts) if draft != text[place + n]), len(drafts))
        rows = 1 + len(drafts)
        speculator.observe(False, 1, rows, world.target(rows))
        speculator.record(drafting, len(drafts), accepted)
        tokens += text[place : place + accepted + 1]
        counts.append(len(drafts))
        seconds += world.target(rows)
    return counts, seconds


def noise_text(size: int, vocabulary: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocabulary) for _ in range(size)]


def test_ngram_copies() -> None:
    """Guards prompt lookup: a copy of the prompt takes a fraction of the rounds, from the first match on."""
    prompt = noise_text(400, 50_000)
    for config in (NGRAM, Speculation("ngram", k=8)):
        speculator = Speculator(config)
        counts, seconds = write(speculator, speculator.begin(), [*prompt, -1], prompt)
        assert seconds <= 0.4 * 400 * CPU.target(1)
        assert counts[:2] == [0, 0], "two tokens must match first"
        assert counts[2] > 0
        assert speculator.tally.rate > 0.9


def test_ngram_stops_where_matches_mislead() -> None:
    """Guards texts whose short repetitions mean nothing: guesses that fail soon are no longer made."""
    text = noise_text(3000, 20)
    speculator = Speculator(NGRAM)
    _, seconds = write(speculator, speculator.begin(), text[:1000], text[1000:])
    assert seconds <= 1.02 * 2000 * CPU.target(1)
    assert 0 < speculator.tally.proposed < 100
    fixed = Speculator(Speculation("ngram", k=3))
    write(fixed, fixed.begin(), text[:1000], text[1000:])
    assert fixed.tally.proposed > 3000, "there were matches enough"


def test_ngram_learns_from_guesses_that_it_keeps_to_itself() -> None:
    """Guards against off for ever: guesses are compared with the text although none is verified, at no cost."""
    speculator = Speculator(NGRAM)
    drafting = speculator.begin()
    misleading = noise_text(3000, 20)
    write(speculator, drafting, [], misleading)
    before = speculator.tally.proposed
    loop = [30, 31] * 30
    tokens = list(misleading)
    for token in loop[:20]:
        assert speculator.propose(drafting, tokens, 0) == []
        tokens.append(token)
    assert speculator.tally.proposed == before
    drafts = speculator.propose(drafting, tokens, 8)
    assert len(drafts) >= 2
    assert drafts == loop[20 : 20 + len(drafts)]


def test_ngram_trusts_long_matches_more() -> None:
    """Guards copies amid chance repetitions: the length of the match tells them apart, within one text."""
    source = noise_text(300, 50_000)
    text = []
    for place in range(0, 300, 60):
        text += [*noise_text(60, 12, seed=place), *source[place : place + 60]]
    speculator = Speculator(NGRAM)
    _, seconds = write(speculator, speculator.begin(), source, text)
    best = min(write(Speculator(Speculation("ngram", k=k)), Drafting(NGRAM), source, text)[1] for k in (1, 2, 3, 4, 8))
    assert seconds <= best


def test_ngram_without_durations() -> None:
    """Guards engines that time nothing: matches are still used, longer ones with more drafts."""
    speculator = Speculator(NGRAM)
    drafting = speculator.begin()
    prompt = noise_text(100, 50_000)
    found = [len(speculator.propose(drafting, [*prompt, -1, *prompt[:size]], 16)) for size in (1, 2, 4, 8, 16)]
    assert found[0] == 0
    assert 0 < found[1] < found[2] < found[4]
