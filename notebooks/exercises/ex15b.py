"""Chapter 15b's exercises: noise of a request, tokens not known yet, steps that go off together, a loop to mend."""

import functools
import itertools
import operator

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, drawn

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
    if not np.array_equal(scores[2], logits[2]):
        raise NotYet("a temperature of 0 is greedy: that row's scores must be its logits, with nothing added.")
    if np.array_equal(scores, logits):
        raise NotYet("no row has noise: add it where the temperature is above 0.")
    noise = functools.partial(_noise, answer)
    of_all = noise(seeds, positions)
    if np.ptp(of_all[0]) == 0:
        raise NotYet("all tokens of a row have the same noise, which changes no choice: draw one number for each.")
    if not np.array_equal(of_all, noise(seeds, positions)):
        raise NotYet("the same call twice has other noise: nothing but seed and position may go into a key.")
    if not np.allclose(scores, logits + temperatures[:, None] * of_all, atol=1e-4):
        raise NotYet("the noise must be multiplied by the row's temperature, and added to the logits as they are.")
    if not np.array_equal(of_all, noise(seeds[::-1], positions[::-1])[::-1]):
        raise NotYet("a request has other noise in another row: its row must not go into its key.")
    if not np.array_equal(of_all[:2], noise(seeds[:2], positions[:2])):
        raise NotYet("a request has other noise when others share its step: each row needs a key of its own.")
    if np.array_equal(*noise([7, 7], [12, 13])):
        raise NotYet("a request has the same noise at positions 12 and 13: its answer would repeat itself.")
    if np.array_equal(*noise([7, 8], [12, 12])):
        raise NotYet("requests with seeds 7 and 8 have the same noise: their answers would be alike.")
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
    if given is None:
        raise NotYet("noisy returns None: write its body.")
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
    ([7, 8, 9, 4], 0, 3, 9, 2, 1),
    ([7, 8, 9], 1, 3, 9, 2, 1),
    ([7, 8, 9], 1, 3, 9, 0, 64),
    ([7, 8, 9], 1, 3, 4, 1, 1),
    ([7, 8, 9, 4], 0, 3, 4, 1, 1),
    ([7, 8, 9, 4], 0, 3, 5, 1, 1),
    ([5, 6, 7, 8, 9, 1], 0, 0, 12, 5, 4),
    ([5, 6, 7, 8, 9, 1], 0, 4, 12, 5, 4),
    ([5, 6, 7, 8, 9, 1], 0, 0, 12, 5, 64),
    ([5, 6, 7, 8, 9, 1], 1, 0, 12, 3, 64),
    ([5, 6, 7, 8, 9, 1], 1, 0, 12, 3, 6),
    ([5, 6, 7, 8, 9, 1], 1, 4, 12, 3, 2),
    ([5, 6, 7, 8, 9, 1], 1, 4, 12, 3, 3),
    ([5], 1, 1, 2, 0, 8),
)


@checker
def check_next_tokens(answer) -> str:
    """Exercise 2: `answer(tokens, pending, computed, most, row, budget)` is the tokens of a request's next chunk."""
    for tokens, pending, computed, most, row, budget in (*PLANS, *drawn(_plan)):
        where = f"for {tokens = }, {pending = }, {computed = }, {most = }, {row = }, {budget = }"
        before = list(tokens)
        given = answer(before, pending, computed, most, row, budget)
        if given is None:
            raise NotYet("next_tokens returns None: write its body.")
        if before != tokens:
            raise NotYet(f"{where}, it changes the request's own list of tokens, to {before}.")
        try:
            given = [operator.index(token) for token in given]
        except TypeError as error:
            raise NotYet(f"{where}, the answer is {given!r}; it must be a list of tokens.") from error
        every = tokens + [-1 - row] * pending
        exact = every[computed:][:budget] if len(every) < most else []
        if given == exact:
            continue
        said = f"{where}, the answer is {given}"
        if not exact:
            raise NotYet(
                f"{said}. With those that are pending the request has all {most} tokens: the last one is sampled, "
                "and never computed."
            )
        if len(given) > budget:
            raise NotYet(f"{said}: {len(given)} tokens are more than the budget.")
        if not given:
            raise NotYet(f"{said}: there is something to compute. The step need not know which token it is.")
        if pending and given == [token if token >= 0 else -row for token in exact]:
            raise NotYet(f"{said}. For row {row} the unknown token is {-1 - row}: -row would make row 0 a token.")
        if pending and exact[-1] < 0 and given == exact[:-1]:
            raise NotYet(f"{said}: the token that is pending can be computed too, as {-1 - row}.")
        if exact[-1] >= 0 and any(token < 0 for token in given):
            raise NotYet(f"{said}; it must be {exact}: all of these tokens are known.")
        if len(given) > len(exact) and given[-len(exact) :] == exact:
            raise NotYet(f"{said}: the first {computed} tokens are computed already.")
        raise NotYet(f"{said}; it must be {exact}.")
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
    for lengths, left, free, page_size, most in (*TOGETHER, *drawn(_together)):
        where = f"for {lengths = }, {left = }, {free = }, {page_size = }, {most = }"
        given = answer(list(lengths), list(left), free, page_size, most)
        if given is None:
            raise NotYet("steps_together returns None: write its body.")
        try:
            given = operator.index(given)
        except TypeError as error:
            raise NotYet(f"{where}, the answer is {given!r}; it must be a whole number.") from error
        sequences = list(zip(lengths, left, strict=True))
        pages = lambda tokens, size=page_size: -(-tokens // size)
        need = lambda steps, of=sequences, pages=pages: sum(pages(n + min(steps, m)) - pages(n) for n, m in of)
        powers = [2**i for i in range(most.bit_length()) if 2**i <= min(most, max(left))]
        exact = max((count for count in powers if need(count) <= free), default=0)
        if given == exact:
            continue
        said = f"{where}, the answer is {given}"
        if given < 0 or given & (given - 1):
            raise NotYet(f"{said}: a program is compiled for 1, 2, 4, ... steps, and for no other number.")
        if given > most:
            raise NotYet(f"{said}, more than {most}.")
        if given > max(left):
            raise NotYet(f"{said}, and no sequence has more than {max(left)} tokens left: the last steps are in vain.")
        if need(given) > free:
            raise NotYet(
                f"{said}: these steps need {need(given)} more pages, and {free} are free. Each sequence rounds up for "
                "itself."
            )
        if sum(pages(n + exact) - pages(n) for n in lengths) > free:
            raise NotYet(f"{said}, and {exact} fit: a sequence with fewer tokens left needs no pages after its last.")
        if given <= min(left) < exact:
            raise NotYet(f"{said}, and {exact} fit: a sequence that ends leaves its row empty, and the others go on.")
        raise NotYet(f"{said}, and {exact} fit: they need {need(exact)} more pages, of {free} that are free.")
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
        self.most_in_flight = self.age = 0
        self.forget()

    def forget(self):
        """An empty cache, and nothing in flight."""
        self.cache, self.last, self.in_flight, self.age = {}, {}, [], self.age + 1

    def launch(self, chunks):
        """Sends off the step; returns what `wait` takes."""
        if not chunks:
            self._wrong("a step without chunks is launched.")
        self._fault("launch")
        before, self.last, tokens = self.last, {}, []
        for chunk in chunks:
            state = self._state_of(chunk, before)
            self.last[chunk.request] = state % 97
            tokens.append(state % 97)
        launched = (self.age, len(self.in_flight), tokens)
        self.in_flight.append(launched)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return launched

    def wait(self, launched):
        """The tokens of a step, one for each of its chunks."""
        self._fault("wait")
        if launched[0] != self.age:
            self._wrong("a step is waited for that was lost with the device: nothing of it is in flight any more.")
        if not self.in_flight or self.in_flight[0] is not launched:
            self._wrong("steps are waited for in another order than that of their launches, or twice.")
        return self.in_flight.pop(0)[-1]

    def _state_of(self, chunk, before) -> int:
        request, pages = chunk.request, chunk.request.pages
        slot = lambda i: (pages[i // self.page_size], i % self.page_size)
        if -(-chunk.end // self.page_size) > len(pages):
            self._wrong("a chunk has no pages for its tokens: the step was taken back or its request lost them.")
        state = 1
        if chunk.start:
            if slot(chunk.start - 1) not in self.cache:
                self._wrong(
                    f"a step reads keys and values of {chunk.start} tokens from pages to which nothing was written: "
                    "the books count tokens that no step has computed."
                )
            state = self.cache[slot(chunk.start - 1)]
        for i in range(chunk.start, chunk.end):
            if i >= len(request.tokens) and request not in before:
                self._wrong("a step needs the token of a step before it that was never computed.")
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
    after = f"{where}, after {sum(before.values())} calls"
    try:
        loop.step()
    except (Refused, Lost, Interrupted):
        if device.raised is None:
            raise NotYet(f"{after}, step raises what the device did not raise.") from None
    except Exception as error:
        if device.problem:
            raise NotYet(f"{after}, {device.problem}") from error
        raise NotYet(
            f"{after}, step raises {type(error).__name__}: {error}. The books are not what the device has computed."
        ) from error
    else:
        if device.raised:
            raise NotYet(f"{after}, the device raises {device.raised.__name__}, and step hides it: raise it again.")
    if device.problem:
        raise NotYet(f"{after}, {device.problem}")
    if device.raised is None and device.calls == before:
        raise NotYet(f"{after}, step neither launches anything nor waits, and requests have not ended.")


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
