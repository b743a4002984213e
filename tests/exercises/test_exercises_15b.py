"""The exercises of chapter 15b: solutions are accepted; wrong answers and untouched skeletons are not."""

import sys

import jax
import jax.numpy as jnp
import pytest

from tests.exercises.answers import NOTEBOOKS, accepted, rejected, skeletons

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex15b  # noqa: E402

skeleton = skeletons("15b_engine")


# Noise that belongs to a request


def gumbel(key, shape):
    return jax.random.gumbel(key, shape)


def noisy(key_of, draw=gumbel, scale=lambda temperatures: temperatures):
    """Scores with a key for each row, of `key_of(seed, position, row)`."""

    def answer(logits, temperatures, seeds, positions):
        rows = jnp.arange(len(logits), dtype=jnp.uint32)
        noise = jax.vmap(lambda *of: draw(key_of(*of), logits.shape[1:]))(seeds, positions, rows)
        return logits + scale(temperatures)[:, None] * noise

    return answer


def folded(seed, position, row=0):
    return jax.random.fold_in(jax.random.key(seed), position)


def position_first(seed, position, row):
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), position), seed)


def weighed(m, n, seed, position, row, of_number=jax.random.key):
    number = m * seed + n * position.astype(jnp.uint32)
    return of_number(number) if of_number else number


def by_inverse(logits, temperatures, seeds, positions):
    """Gumbel's distribution written out, one row after the other."""
    rows = []
    for row, temperature, seed, position in zip(logits, temperatures, seeds, positions, strict=True):
        uniform = jax.random.uniform(folded(seed, position), row.shape, minval=1e-30)
        rows.append(row - temperature * jnp.log(-jnp.log(uniform)))
    return jnp.stack(rows)


def by_inverse_at_once(logits, temperatures, seeds, positions):
    return by_inverse(logits, temperatures, seeds, positions) if len(logits) < 99 else noisy(folded)(
        logits, temperatures, seeds, positions
    )  # fmt: skip


@pytest.mark.parametrize("right", [noisy(folded), noisy(position_first), by_inverse_at_once])
def test_noisy_solutions(right):
    accepted(ex15b.check_noisy(right))


def one_key(logits, temperatures, seeds, positions):
    key = jax.random.fold_in(jax.random.key(seeds.sum()), positions.sum())
    return logits + temperatures[:, None] * jax.random.gumbel(key, logits.shape)


def of_the_clock(logits, temperatures, seeds, positions, calls=[]):  # noqa: B006
    calls.append(0)
    return noisy(lambda *of: folded(len(calls), of[1]))(logits, temperatures, seeds, positions)


def divided(logits, temperatures, seeds, positions):
    some = jnp.where(temperatures > 0, temperatures, 1)[:, None]
    return noisy(folded, scale=lambda t: t > 0)(logits / some, temperatures, seeds, positions)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (noisy(lambda seed, position, row: folded(row, position)), "in another row"),
        (noisy(lambda seed, position, row: jax.random.fold_in(folded(seed, position), row)), "in another row"),
        (one_key, "in another row"),
        (of_the_clock, "twice has other noise"),
        (noisy(lambda seed, position, row: jax.random.key(seed)), "would repeat itself"),
        (noisy(lambda seed, position, row: jax.random.key(position)), "would be alike"),
        (noisy(lambda seed, position, row: jax.random.key(seed + position.astype(jnp.uint32))), "a sum of the two"),
        (noisy(lambda seed, position, row: jax.random.key(seed ^ position.astype(jnp.uint32))), "a sum of the two"),
        (noisy(lambda *of: weighed(65537, 1, *of)), "is no key"),
        (noisy(lambda *of: weighed(7919, 5, *of)), "is no key"),
        (noisy(lambda *of: weighed(2**16, 1, *of)), "is no key"),
        (noisy(lambda *of: weighed(1, 2**20, *of)), "is no key"),
        (noisy(lambda *of: jax.random.fold_in(jax.random.key(0), weighed(65537, 1, *of, of_number=None))), "is no key"),
        (noisy(folded, draw=jax.random.normal), "is the noise Gumbel's"),
        (noisy(folded, draw=lambda key, shape: jnp.full(shape, jax.random.gumbel(key))), "changes no choice"),
        (noisy(folded, scale=jnp.ones_like), "is greedy"),
        (noisy(folded, scale=lambda t: 1.0 * (t > 0)), "multiplied by the row's temperature"),
        (divided, "multiplied by the row's temperature"),
        (lambda logits, *_: logits, "no row has noise"),
        (lambda logits, *_: logits[0], "it must be the same"),
        (lambda *args: None, "write its body"),
    ],
)
def test_noisy_wrong(wrong, said):
    rejected(ex15b.check_noisy(wrong), said)


# A step that is planned before the tokens are known


def next_tokens(tokens, pending, computed, most, row, budget, *, unknown=lambda row: -1 - row, ends=True, cut=True):
    if ends and len(tokens) + pending == most:
        return []
    every = tokens + [unknown(row)] * pending
    return every[computed : computed + budget] if cut else every[computed:]


def token_by_token(tokens, pending, computed, most, row, budget):
    chunk, total = [], len(tokens) + pending
    if total >= most:
        return chunk
    for i in range(computed, min(total, computed + budget)):
        chunk.append(tokens[i] if i < len(tokens) else ~row)
    return chunk


@pytest.mark.parametrize("right", [next_tokens, token_by_token])
def test_next_tokens_solutions(right):
    accepted(ex15b.check_next_tokens(right))


def waits(tokens, pending, *rest):
    return [] if pending else next_tokens(tokens, pending, *rest)


def pops(tokens, pending, computed, *rest):
    chunk = next_tokens(tokens, pending, computed, *rest)
    tokens.append(0)
    return chunk


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda *args: next_tokens(*args, ends=False), "and never computed"),
        (lambda *args: next_tokens(*args, cut=False), "more than the budget"),
        (lambda *args: next_tokens(*args, unknown=lambda row: -row), "would make row 0 a token"),
        (lambda *args: next_tokens(*args, unknown=lambda row: -1), "it must be"),
        (lambda tokens, pending, *rest: next_tokens(tokens, 1, *rest), "and never computed"),
        (lambda tokens, pending, computed, *rest: next_tokens(tokens, pending, 0, *rest), "it must be"),
        (lambda t, p, c, most, row, b: next_tokens(t, p, 0, most, row, 64)[:b] if b > 64 else [], "need not know"),
        (waits, "need not know"),
        (pops, "own list"),
        (lambda *args: 3, "a list of tokens"),
        (lambda *args: None, "write its body"),
    ],
)
def test_next_tokens_wrong(wrong, said):
    rejected(ex15b.check_next_tokens(wrong), said)


# Steps that go off together


def steps_together(lengths, left, free, page_size, most, *, ends=True, of_left=max, halves=True, none=0):
    count = most
    while count:
        need = 0
        for length, more in zip(lengths, left, strict=True):
            more = min(count, more) if ends else count
            need += -(-(length + more) // page_size) - -(-length // page_size)
        if need <= free and count <= of_left(left):
            return count
        count = count // 2 if halves else count - 1
    return none


def by_doubling(lengths, left, free, page_size, most):
    """From one step on, a page at a time."""
    lengths, best, done = list(lengths), 0, 0
    while done < min(most, max(left)):
        for i, length in enumerate(lengths):
            if left[i] > done:
                free -= length % page_size == 0
                lengths[i] += 1
        if free < 0:
            break
        done += 1
        best = done if done & (done - 1) == 0 else best
    return best


@pytest.mark.parametrize("right", [steps_together, by_doubling])
def test_steps_together_solutions(right):
    accepted(ex15b.check_steps_together(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda *args: steps_together(*args, ends=False), "after its last"),
        (lambda *args: steps_together(*args, of_left=min), "leaves its row empty"),
        (lambda *args: steps_together(*args, of_left=lambda left: 99), "are in vain"),
        (lambda *args: steps_together(*args, halves=False), "for no other number"),
        (lambda *args: steps_together(*args, none=1), "rounds up for itself"),
        (lambda n, left, free, size, most: steps_together(n, left, free + 1, size, most), "rounds up for itself"),
        (lambda n, left, free, size, most: steps_together(n, left, 0, size, most), "and 4 fit"),
        (lambda *args: 2 * steps_together(*args), "more than 4"),
        (lambda *args: "many", "a whole number"),
        (lambda *args: None, "write its body"),
    ],
)
def test_steps_together_wrong(wrong, said):
    rejected(ex15b.check_steps_together(wrong), said)


# A loop to mend

Broken = skeleton("exercise-4")["Loop"]


class Loop(Broken):
    takes_back, raises, keeps, restarts = BaseException, True, True, Exception

    def launch(self):
        if chunks := self.scheduler.schedule():
            try:
                launched = self.device.launch(chunks)
            except self.takes_back:
                self.scheduler.unschedule()
                if self.raises:
                    raise
                return False
            self.in_flight.append((chunks, launched))
        return bool(chunks)

    def complete(self):
        chunks, launched = self.in_flight[0] if self.keeps else self.in_flight.pop(0)
        try:
            tokens = self.device.wait(launched)
        except self.restarts:
            self.in_flight = []
            self.scheduler.restart()
            raise
        if self.keeps:
            self.in_flight.pop(0)
        self.scheduler.complete(chunks, tokens)


class WithFinally(Broken):
    """Another right one: it looks at what was reached, and restarts before the next step."""

    is_lost = False

    def step(self):
        if self.is_lost:
            self.in_flight, self.is_lost = [], False
            self.scheduler.restart()
        super().step()

    def launch(self):
        chunks, launched = self.scheduler.schedule(), None
        if not chunks:
            return False
        try:
            launched = self.device.launch(chunks)
        finally:
            if launched is None:
                self.scheduler.unschedule()
        self.in_flight.append((chunks, launched))
        return True

    def complete(self):
        chunks, launched = self.in_flight[0]
        try:
            tokens = self.device.wait(launched)
        except KeyboardInterrupt:
            raise
        except BaseException:
            self.is_lost = True
            raise
        del self.in_flight[0]
        self.scheduler.complete(chunks, tokens)


@pytest.mark.parametrize("right", [Loop, WithFinally])
def test_loop_solutions(right):
    accepted(ex15b.check_loop(right))


def loop(**changes):
    """The right loop with some members changed."""
    return type("Loop", (Loop,), changes)


def one_at_a_time(self):
    if self.launch():
        self.complete()


def nothing(self):
    pass


def keeps_what_is_lost(self):
    chunks, launched = self.in_flight[0]
    try:
        tokens = self.device.wait(launched)
    except Exception:
        self.scheduler.restart()
        raise
    self.in_flight.pop(0)
    self.scheduler.complete(chunks, tokens)


def raises_its_own(self):
    raise ex15b.Refused


@pytest.mark.parametrize(
    "wrong, said",
    [
        (Broken, "every fifth launch is refused"),
        (loop(takes_back=Exception), "every sixth launch is interrupted"),
        (loop(takes_back=KeyboardInterrupt), "every fifth launch is refused"),
        (loop(raises=False), "step hides it"),
        (loop(keeps=False), "every fourth wait is interrupted"),
        (loop(restarts=ZeroDivisionError), "every ninth wait finds the device lost"),
        (loop(restarts=BaseException), "every fourth wait is interrupted"),
        (loop(complete=keeps_what_is_lost), "that was lost with the device"),
        (loop(step=one_at_a_time), "must be a step ahead"),
        (loop(step=nothing), "neither launches anything nor waits"),
        (loop(step=raises_its_own), "the device did not raise"),
        (lambda *args: None, "has no attribute 'step'"),
    ],
)
def test_loop_wrong(wrong, said):
    rejected(ex15b.check_loop(wrong), said)
