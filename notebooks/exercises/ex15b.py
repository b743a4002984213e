"""Chapter 15b's exercises: noise of a request, tokens not known yet, steps that go off together, a loop to mend."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, require_answers

from serving import PageAllocator, Request, Scheduler

# Exercise 1: noise that belongs to a request -------------------------------------------------------------------------

VOCABULARY = 64
DRAWS = 16_000
# (seed, position) twice, different ones whose sum, product or bits together are the same. Keys have 32 bits, so the
# last two lines find every `m * seed + n * position`, and `^` too: m even, n even, m / n with a rest of 1 or 3 by 4.
ALIKE = (
    *(((1, 5), (2, 4)), ((2, 6), (3, 4)), ((3, 4), (4, 3)), ((9, 0), (0, 9)), ((2**31 + 5, 7), (5, 7))),
    *(((2**31, 0), (0, 0)), ((0, 2**30), (0, 0)), ((2**31, 0), (0, 2**30))),
    *(((2**30, 0), (0, 2**30)), ((2**30, 2**30), (0, 0)), ((2**30, 2**30), (2**31, 0))),
)


@checker
def check_noisy(answer) -> str:
    """Exercise 1: `answer(logits, temperatures, seeds, positions)` is the scores that tokens are chosen by."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((5, VOCABULARY)).astype(np.float32)
    temperatures = np.float32([0.8, 1.0, 0.0, 0.5, 1.3])
    seeds, positions = [7, 123, 9, 2**32 - 1, 40], [12, 300, 5, 0, 77]
    scores = _scores(answer, logits, temperatures, seeds, positions)
    noise = functools.partial(_noise, answer)
    of_all, same = noise(seeds, positions), np.array_equal
    for is_wrong, said in (
        (not same(scores[2], logits[2]), "a temperature of 0 is greedy: its scores are its logits, nothing is added."),
        (same(scores, logits), "no row has noise: add it where the temperature is above 0."),
        (np.ptp(of_all[0]) == 0, "all tokens of a row have the same noise, which changes no choice: draw one number "
         "for each."),
        (not same(of_all, noise(seeds, positions)), "the same call twice has other noise: nothing but seed and "
         "position may go into a key."),
        (not np.allclose(scores, logits + temperatures[:, None] * of_all, atol=1e-4), "the noise must be multiplied by "
         "the row's temperature, and added to the logits as they are."),
        (not same(of_all, noise(seeds[::-1], positions[::-1])[::-1]), "a request has other noise in another row: its "
         "row must not go into its key."),
        (not same(of_all[:2], noise(seeds[:2], positions[:2])), "a request has other noise when others share its step: "
         "each row needs a key of its own."),
        (same(*noise([7, 7], [12, 13])), "a request has the same noise at positions 12 and 13: its answer would repeat "
         "itself."),
        (same(*noise([7, 8], [12, 12])), "requests with seeds 7 and 8 have the same noise: their answers would be "
         "alike."),
    ):  # fmt: skip
        if is_wrong:
            raise NotYet(said)
    of_pairs = noise(*zip(*itertools.chain(*ALIKE), strict=True)).reshape(-1, 2, VOCABULARY)
    for ((seed, at), (other, at_other)), pair in zip(ALIKE, of_pairs, strict=True):
        if np.array_equal(*pair):
            raise NotYet(
                f"seed {seed} at position {at} has the noise of seed {other} at position {at_other}: a sum of the two, "
                "or of their multiples, is no key. Make a key of the seed, and a key of that key and the position."
            )
    _require_softmax(answer)
    return "The same request has the same noise wherever and whenever it is served, and no two share theirs."


def _scores(answer, logits, temperatures, seeds, positions) -> np.ndarray:
    given = answer(
        jnp.asarray(logits), jnp.asarray(temperatures, jnp.float32), jnp.asarray(seeds, jnp.uint32),
        jnp.asarray(positions, jnp.int32),
    )  # fmt: skip
    given = np.asarray(given)
    if given.shape != logits.shape:
        raise NotYet(f"for logits of shape {logits.shape} the scores have shape {given.shape}; it must be the same.")
    return given


def _noise(answer, seeds, positions) -> np.ndarray:
    return _scores(answer, np.zeros((len(seeds), VOCABULARY), np.float32), [1.0] * len(seeds), seeds, positions)


def _require_softmax(answer) -> None:
    """Raises NotYet unless tokens come as often as the softmax says, over many positions of one request."""
    logits, temperature = np.float32([0.0, 1.0, 2.0, -1.0]), 0.7
    every = np.broadcast_to(logits, (DRAWS, 4))
    scores = _scores(answer, every, [temperature] * DRAWS, [3] * DRAWS, range(DRAWS))
    share = np.bincount(scores.argmax(axis=1), minlength=4) / DRAWS
    wanted = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    worst = np.abs(share - wanted).argmax()
    if abs(share[worst] - wanted[worst]) > 0.02:
        raise NotYet(
            f"over {DRAWS:,} positions token {worst} of four is chosen in {share[worst]:.0%}, and its probability is "
            f"{wanted[worst]:.0%}: is the noise Gumbel's?"
        )


# Exercise 2: a step that is planned before the tokens are known -------------------------------------------------------

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
    """Exercise 2: `answer(tokens, pending, computed, most, row, budget)` is the tokens of a request's next chunk."""

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


# Exercise 3: steps that go off together -------------------------------------------------------------------------------

TOGETHER = (  # lengths, left, free, page_size, most.
    ([5], [9], 3, 4, 4),
    ([5], [9], 0, 4, 4),
    ([8], [9], 0, 4, 4),
    ([5, 6, 9], [9, 9, 9], 1, 4, 4),
    ([5, 6, 9], [9, 9, 9], 3, 4, 4),
    ([5, 6, 9], [9, 9, 9], 3, 4, 8),
    ([7, 7, 7], [1, 1, 6], 9, 4, 8),
    ([7, 7, 7], [1, 1, 8], 1, 4, 8),
    ([7, 8, 7], [2, 1, 3], 9, 4, 8),
    ([3, 3], [1, 1], 4, 4, 8),
    ([1, 2, 3, 4, 5, 6], [20] * 6, 3, 8, 16),
    ([16, 16], [5, 5], 1, 16, 4),
    ([30, 2, 17], [40, 40, 40], 2, 16, 32),
    ([12, 13], [2, 30], 1, 16, 1),
)


@checker
def check_steps_together(answer) -> str:
    """Exercise 3: `answer(lengths, left, free, page_size, most)` is how many steps may go off in one program."""

    def together(lengths, left, free, page_size, most, *, ends=True, of_left=max, powers=True):
        pages = lambda tokens: -(-tokens // page_size)
        for steps in range(min(most, of_left(left)), 0, -1):
            of_each = [(n, min(steps, more) if ends else steps) for n, more in zip(lengths, left, strict=True)]
            fits = sum(pages(n + more) - pages(n) for n, more in of_each) <= free
            if fits and not (powers and steps & (steps - 1)):
                return steps
        return 0

    likely = (
        (dict(ends=False), "A sequence with fewer tokens left needs no pages after its last."),
        (dict(of_left=min), "A sequence that ends leaves its row empty, and the others go on."),
        (dict(of_left=lambda left: 99), "No sequence has as many tokens left: the last steps are in vain."),
        (dict(powers=False), "A program is compiled for 1, 2, 4, ... steps, and for no other number."),
    )
    said = "The most steps, a power of two up to `most`, whose new pages are free; each sequence rounds up for itself."
    require_answers(answer, TOGETHER, together, likely, said, draw=_together)
    return "The pages of all steps are known before the first: lengths do not depend on tokens."


def _together(rng):
    lengths, left = rng.integers(1, 40, (2, 4)).tolist()
    return lengths, left, int(rng.integers(0, 12)), int(rng.integers(1, 17)), int(2 ** rng.integers(0, 6))


# Exercise 4: a loop to mend -------------------------------------------------------------------------------------------


class Refused(Exception):
    """The device does not take a step: nothing of it is computed."""


class Lost(Exception):
    """The device has failed: its cache is lost, and so is every step in flight."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C."""


FAULTS = (  # A name; {when: (exception, every how many calls)}.
    ("without a fault", {}),
    ("where every fifth launch is refused", {"launch": (Refused, 5)}),
    ("where every sixth launch is interrupted", {"launch": (Interrupted, 6)}),
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
    except (Refused, Lost, Interrupted):
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
