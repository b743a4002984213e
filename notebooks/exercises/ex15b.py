"""Chapter 15b's exercises: tokens not known yet, noise of a request, the best token, a loop to fix."""

import functools
import itertools
import math

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, play_kernel, require_answers, run_kernel

from serving import PageAllocator, Request, Scheduler

# Exercise 1: a step that is planned before the tokens are known -------------------------------------------------------

PLANS = (  # tokens, pending, computed, most, row, budget: decoding, at the end, in the prompt, preempted.
    ([7, 8, 9, 4], 0, 3, 9, 2, 1), ([7, 8, 9], 1, 3, 9, 2, 1), ([7, 8, 9], 1, 3, 9, 0, 64),
    ([7, 8, 9], 1, 3, 4, 1, 1), ([7, 8, 9, 4], 0, 3, 4, 1, 1), ([7, 8, 9, 4], 0, 3, 5, 1, 1),
    ([5, 6, 7, 8, 9, 1], 0, 0, 12, 5, 4), ([5, 6, 7, 8, 9, 1], 0, 4, 12, 5, 4),
    ([5, 6, 7, 8, 9, 1], 0, 0, 12, 5, 64), ([5, 6, 7, 8, 9, 1], 1, 0, 12, 3, 64),
    ([5, 6, 7, 8, 9, 1], 1, 0, 12, 3, 6), ([5, 6, 7, 8, 9, 1], 1, 4, 12, 3, 2),
    ([5, 6, 7, 8, 9, 1], 1, 4, 12, 3, 3), ([5], 1, 1, 2, 0, 8),
)  # fmt: skip


@checker
def check_next_tokens(answer) -> str:
    """Exercise 1: `answer(tokens, pending, computed, most, row, budget)` is the tokens of a request's next chunk."""

    def chunk(tokens, pending, computed, most, row, budget, *, unknown=lambda row: -1 - row, ends=True, waits=False):
        every = tokens + [unknown(row)] * pending
        return every[computed:][:budget] if (len(every) < most or not ends) and not (waits and pending) else []

    likely = (
        (dict(ends=False), "A request that has all its tokens, those that are pending too, is done: the last one is "
         "sampled, and never computed."),
        (dict(unknown=lambda row: -row), "-row would make row 0 a token: the unknown token of a row is -1 - row."),
        (dict(waits=True), "There is something to compute. The step need not know which token it is."),
        (lambda *case: chunk(*case[:5], 64), "That is more than the budget."),
    )  # fmt: skip
    said = "The tokens from `computed` on, as many as the budget allows; a pending one is -1 - row, and comes last."
    require_answers(answer, PLANS, chunk, likely, said, draw=_plan)
    return "How many tokens there are is enough to plan a step. The device knows which they are when it needs them."


def _plan(rng):
    tokens, pending = rng.integers(0, 50, int(rng.integers(2, 9))).tolist(), int(rng.integers(0, 2))
    computed, more, row, budget = rng.integers((0, 0, 0, 1), (len(tokens), 5, 9, 10)).tolist()
    return tokens, pending, computed, len(tokens) + pending + more, row, budget


# Exercise 2: noise that belongs to a request -------------------------------------------------------------------------

VOCABULARY = 1024  # Four pieces: with two of them, more rules than the right one number the tokens.
# (seed, position) twice, different ones whose sum, product or bits together are the same. Keys have 32 bits, so the
# last two lines find every `m * seed + n * position`, and `^` too: m even, n even, m / n with a rest of 1 or 3 by 4.
ALIKE = (
    *(((1, 5), (2, 4)), ((2, 6), (3, 4)), ((3, 4), (4, 3)), ((9, 0), (0, 9)), ((2**31 + 5, 7), (5, 7))),
    *(((2**31, 0), (0, 0)), ((0, 2**30), (0, 0)), ((2**31, 0), (0, 2**30))),
    *(((2**30, 0), (0, 2**30)), ((2**30, 2**30), (0, 0)), ((2**30, 2**30), (2**31, 0))),
)
NEIGHBOURS = (((7, 12), (7, 13)), ((7, 12), (8, 12)))


@checker
def check_noisy(answer) -> str:
    """Exercise 2: `answer(logits, temperatures, seeds, positions)` is a kernel: the scores to choose by."""
    logits = normal(0, (5, VOCABULARY))
    temperatures = np.float32([0.8, 1.0, 0.0, 0.5, 1.3])
    seeds, positions = [7, 123, 9, 2**32 - 1, 40], [12, 300, 5, 0, 77]
    scores = _scores(answer, logits, temperatures, seeds, positions)
    noise = functools.partial(_noise, answer)
    of_all, same = noise(seeds, positions), np.array_equal
    for is_wrong, said in (
        (lambda: same(scores, logits), "no row has noise: add it where the temperature is above 0."),
        (lambda: not same(scores[2], logits[2]), "a temperature of 0 is greedy: its scores are its logits, nothing is "
         "added."),
        (lambda: np.ptp(of_all[0]) == 0, "all tokens of a row have the same noise, which changes no choice: mix the "
         "token into the bits."),
        (lambda: len(np.unique(of_all[0])) < 0.9 * VOCABULARY, "a token has the same noise as another token of its "
         "row: count tokens from the beginning of the row, not of the piece."),
        (lambda: not same(of_all, noise(seeds, positions)), "the same call twice has other noise: nothing but seed, "
         "position and token may go into it."),
        (lambda: not np.allclose(scores, logits + temperatures[:, None] * of_all, atol=1e-4), "the noise must be "
         "multiplied by the row's temperature, and added to the logits as they are."),
        (lambda: not same(of_all, noise(seeds[::-1], positions[::-1])[::-1]), "a request has other noise in another "
         "row: its row must not go into its key."),
        (lambda: not same(of_all[:2], noise(seeds[:2], positions[:2])), "a request has other noise when others share "
         "its step: how many they are must not go into its key."),
    ):  # fmt: skip
        if is_wrong():
            raise NotYet(said)
    _require_own_noise(answer)
    return "The same request has the same noise wherever and whenever it is served, and no two share theirs."


def _scores(answer, logits, temperatures, seeds, positions) -> np.ndarray:
    given = run_kernel(
        answer, jnp.asarray(logits, jnp.float32), jnp.asarray(temperatures, jnp.float32),
        jnp.asarray(seeds, jnp.uint32), jnp.asarray(positions, jnp.int32),
    )  # fmt: skip
    if given.shape != logits.shape:
        raise NotYet(f"for logits of shape {logits.shape} the scores have shape {given.shape}; it must be the same.")
    return np.asarray(given)


def _noise(answer, seeds, positions) -> np.ndarray:
    return _scores(answer, np.zeros((len(seeds), VOCABULARY)), [1.0] * len(seeds), seeds, positions)


def _require_own_noise(answer) -> None:
    """Raises NotYet if two pairs of seed and position share noise, in the same places or in others, or if it is not
    distributed as Gumbel's."""
    pairs = NEIGHBOURS + ALIKE
    noise = _noise(answer, *zip(*itertools.chain(*pairs), strict=True)).reshape(-1, 2, VOCABULARY)
    for ((seed, at), (other, at_other)), (a, b) in zip(pairs, noise, strict=True):
        if np.array_equal(a, b):
            raise NotYet(
                f"seed {seed} at position {at} has the noise of seed {other} at position {at_other}: "
                + ("its answer would repeat itself." if (seed, at_other) == (other, at + 1) else
                   "their answers would be alike." if at == at_other and other == seed + 1 else
                   "a sum of the two, or of their multiples, is no key. Mix the seed before the position joins it.")
            )  # fmt: skip
        if len(np.intersect1d(a, b)) > VOCABULARY // 8:
            raise NotYet(
                f"seed {seed} at position {at} has the numbers of seed {other} at position {at_other}, in other "
                "places: mix seed and position into one key before the token joins it."
            )
    values = np.sort(noise[:, 0].ravel().astype(np.float64))
    share = (np.arange(len(values)) + 0.5) / len(values)
    with np.errstate(over="ignore"):
        off = np.abs(np.exp(-np.exp(-values)) - share)
    if not off.max() < 0.04:
        at = int(np.nan_to_num(off, nan=1.0).argmax())
        raise NotYet(
            f"{share[at]:.0%} of the noise lies below {values[at]:.2f}, and by Gumbel's distribution it would be "
            f"{math.exp(-math.exp(min(-values[at], 300))):.0%}: is the noise Gumbel's?"
        )


# Exercise 3: the best token ------------------------------------------------------------------------------------------


@checker
def check_best_tokens(answer) -> str:
    """Exercise 3: `answer(scores)` is a kernel: each row's token of the largest score, the smallest of several."""
    x = normal(1, (3, 1024))
    ties = x.at[0, jnp.asarray([900, 300, 44, 45])].set(9.0).at[1, jnp.asarray([1023, 700])].set(9.0)
    cases = (
        ("with normal scores", x),
        ("with rows of 1792, the best in the last piece", normal(2, (2, 1792)).at[:, -7].add(9.0)),
        ("where several scores are equally large", ties.at[2, :].set(jnp.round(ties[2]))),
        ("where all scores are negative", x - 20_000),
        ("where all scores but some are -inf", jnp.full((2, 512), -jnp.inf).at[0, 300].set(-3e38).at[1, 511].set(2.0)),
        ("with five rows of 256", normal(3, (5, 256))),
        ("with a row of 131072, as large as a vocabulary", jnp.zeros((1, 2**17)).at[0, 2**17 - 3].set(1.0)),
    )  # fmt: skip
    for where, scores in cases:
        found, exact = np.asarray(run_kernel(answer, scores)), np.asarray(scores).argmax(axis=1)
        if found.shape != exact.shape or found.dtype != np.int32:
            raise NotYet(f"it returns {found.dtype} of shape {found.shape}; it must be int32 of shape {exact.shape}.")
        if wrong := np.flatnonzero(found != exact).tolist():
            row = wrong[0]
            raise NotYet(f"{where}, row {row}: it gives token {found[row]}, and {exact[row]} is right. "
                         + _reason(np.asarray(scores), found))  # fmt: skip
    loaded = max(map(_values_read, itertools.chain(*play_kernel(answer, x))))
    if loaded > x.shape[1]:
        raise NotYet(f"it is right, but a block reads a row {loaded / x.shape[1]:.0f} times: one pass is enough.")
    return "One pass over a row finds its largest score and the token that has it."


def _reason(scores, found) -> str:
    exact, count = scores.argmax(axis=1), scores.shape[1]
    is_token = (found >= 0) & (found < count)
    if is_token.all() and (scores[np.arange(len(found)), found] == scores.max(axis=1)).all():
        return "Both have the largest score: the smallest token wins."
    if np.array_equal(found, exact % 256):
        return "That is its place in a piece: add where the piece begins."
    if (scores.max(axis=1) < 0).any() and is_token.all():
        return "Do you begin with -inf, which is below all scores? Here all scores are negative, or many are -inf."
    if is_token.all() and np.array_equal(found // 256, np.full_like(found, count // 256 - 1)):
        return "The best of the last piece is not the best of the row: keep the larger one at each place."
    return (
        "A thread remembers, for each place of a piece, the largest score so far and its token; then the largest of "
        "all places decides, at the place that has it."
    )


def _values_read(block) -> int:
    """Values of a row that a block reads from global memory."""
    direct = sum(math.prod(size for _, size in box) for _, box in block.fetched)
    return direct + sum(math.prod(event.shape) for event in block.events if event.kind == "load")


# Exercise 4: a loop to fix --------------------------------------------------------------------------------------------


class Refused(Exception):
    """The device does not take a step: nothing of it is computed."""


class Lost(Exception):
    """The device has failed: its cache is lost, and so is every step in flight."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C."""


class Ended(SystemExit):
    """Somebody ends the program: neither an `Exception` nor a `KeyboardInterrupt`."""


FAULTS = (  # A name; {when: (exception, every how many calls)}.
    ("without a fault", {}),
    ("where every fifth launch is refused", {"launch": (Refused, 5)}),
    ("where every sixth launch is interrupted", {"launch": (Interrupted, 6)}),
    ("where every eighth launch ends the program", {"launch": (Ended, 8)}),
    ("where every fourth wait is interrupted", {"wait": (Interrupted, 4)}),
    ("where every ninth wait finds the device lost", {"wait": (Lost, 9)}),
    ("where launches are refused and the device is lost", {"launch": (Refused, 7), "wait": (Lost, 8)}),
)
STEPS_MOST = 600


class Device:
    """Computes tokens from what its cache holds, as a model would: a chain over all tokens of a request so far."""

    def __init__(self, page_size: int, faults: dict):
        self.page_size, self.faults, self.calls = page_size, faults, dict(launch=0, wait=0)
        self.raised = self.problem = None  # In this step; what was wrong with it.
        self.most_in_flight = 0
        self.forget()

    def forget(self):
        """An empty cache, and nothing in flight."""
        self.cache, self.last, self.in_flight = {}, {}, []

    def launch(self, chunks):
        """Sends off the step; returns what `wait` takes."""
        self._fault("launch")
        before, self.last = self.last, {}
        for chunk in chunks:
            try:
                self.last[chunk.request] = self._state_of(chunk, before) % 97
            except LookupError:
                self._wrong(
                    "a step reads tokens that no step has computed, or from pages that its request has not: the books "
                    "count a step that was refused, or lost with the device."
                )
        launched = list(self.last.values())
        self.in_flight.append(launched)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return launched

    def wait(self, launched):
        """The tokens of a step, one for each of its chunks."""
        self._fault("wait")
        if not self.in_flight or self.in_flight[0] is not launched:
            self._wrong("a step is waited for that was lost with the device, twice, or not in the order of launches.")
        return self.in_flight.pop(0)

    def _state_of(self, chunk, before) -> int:
        request = chunk.request
        slot = lambda i: (request.pages[i // self.page_size], i % self.page_size)
        state = self.cache[slot(chunk.start - 1)] if chunk.start else 1
        for i in range(chunk.start, chunk.end):
            token = request.tokens[i] if i < len(request.tokens) else before[request]
            state = self.cache[slot(i)] = _chained(state, token)
        return state

    def _fault(self, name: str):
        self.calls[name] += 1
        kind, every = self.faults.get(name, (None, 0))
        if kind and self.calls[name] % every == 0:
            if kind is Lost:
                self.forget()
            self.raised = kind
            raise kind

    def _wrong(self, problem: str):
        self.problem = self.problem or problem
        raise NotYet(problem)


def _chained(state: int, token: int) -> int:
    return (state * 1_000_003 + 7 * token + 11) % (2**31 - 1)


def _reference(request: Request) -> list[int]:
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.max_new_tokens:
        tokens.append(functools.reduce(_chained, tokens, 1) % 97)
        if tokens[-1] in request.stop_tokens:
            break
    return tokens[len(request.prompt) :]


def _requests() -> list[Request]:
    rng = np.random.default_rng(4)
    begins = rng.integers(0, 97, 8).tolist()
    requests = []
    for i in range(12):
        prompt = (begins if i % 3 == 0 else []) + rng.integers(0, 97, int(rng.integers(1, 12))).tolist()
        requests.append(Request(prompt, int(rng.integers(2, 14))))
    for i in (2, 5, 9):  # These end early, with a token that nobody could expect.
        stop = _reference(requests[i])[:3][-1]
        requests[i] = Request(requests[i].prompt, requests[i].max_new_tokens, stop_tokens=(stop,))
    return requests


@checker
def check_loop(answer) -> str:
    """Exercise 4: `answer(scheduler, device)` has a `step` that survives what the device raises."""
    for said, faults in FAULTS:
        device, requests = Device(4, faults), _requests()
        scheduler = Scheduler(PageAllocator(16, 4), max_seqs=5, max_tokens_per_step=9)
        for request in requests:
            scheduler.submit(request)
        loop, where = answer(scheduler, device), f"On a device {said}"
        for _ in range(STEPS_MOST):
            if not (scheduler.running or scheduler.waiting or device.in_flight):
                break
            _step_once(loop, device, where)
        _require_end(requests, scheduler, device, where)
    return "A step is launched or taken back, waited for or still in flight; and a lost cache costs time, no answer."


def _step_once(loop, device: Device, where: str) -> None:
    """One step of an answer, whose exceptions are those of the device, or NotYet."""
    before, device.raised = device.calls.copy(), None
    said = None
    try:
        loop.step()
    except (Refused, Lost, Interrupted, Ended):
        said = None if device.raised else "step raises what the device did not raise."
    except Exception as error:
        said = f"step raises {type(error).__name__}: {error}. The books are not what the device has computed."
    else:
        if device.raised:
            said = f"the device raises {device.raised.__name__}, and step hides it: raise it again."
        elif device.calls == before:
            said = "step neither launches anything nor waits, and requests have not ended."
    if said := device.problem or said:
        raise NotYet(f"{where}, after {sum(before.values())} calls, {said}")


def _require_end(requests, scheduler: Scheduler, device: Device, where: str) -> None:
    for i, request in enumerate(requests):
        if not request.finished:
            raise NotYet(f"{where}, request {i} has not ended after {STEPS_MOST} steps: its next token never comes.")
        if request.generated != (exact := _reference(request)):
            raise NotYet(f"{where}, request {i} has the tokens {request.generated}; they must be {exact}.")
    if scheduler.allocator.num_held:
        raise NotYet(f"{where}, all requests have ended, and {scheduler.allocator.num_held} pages are still held.")
    if device.most_in_flight < 2:
        raise NotYet(f"{where}, each step is waited for before the next is launched: the loop must be a step ahead.")
