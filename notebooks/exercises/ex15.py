"""Chapter 15's exercises: slots, a scheduler to repair, shared pages, a step under a budget."""

import copy

import numpy as np
from exercises.judge import NotYet, checker, drawn

SLOTS = (  # pages, num_computed, free, page_size.
    ([7, 2], 20, [5, 9], 16),
    ([7, 2], 32, [5, 9], 16),
    ([7, 2], 31, [5, 9], 16),
    ([], 0, [3], 16),
    ([4], 16, [], 16),
    ([4], 15, [], 16),
    ([], 0, [], 16),
    ([8, 1, 6], 11, [2], 4),
    ([8, 1, 6], 12, [2, 0], 4),
)
HELD = (  # pages, references, free.
    ([0, 1, 2], [1, 1, 1, 0], [3]),
    ([0, 1, 2], [2, 2, 1, 0], [3]),
    ([2, 0], [3, 1, 3, 0], [3]),
    ([3, 1], [0, 1, 0, 1], [0, 2]),
    ([], [1, 0], [1]),
)
TWICE = (  # As HELD, and a page occurs in `pages` as often as the sequence holds it.
    ([0, 0, 1], [2, 1], []),
    ([2, 2, 1], [1, 1, 3], []),
)
STEPS = [  # uncomputed, budget.
    ([1, 1, 1], 3),
    ([1, 1, 1], 8),
    ([10], 4),
    ([10, 1], 4),
    ([1, 10, 1], 8),
    ([10, 10, 1], 8),
    ([3, 10, 1, 1], 8),
    ([3, 2, 1, 4], 32),
    ([50, 1, 1, 1], 3),
    ([5, 5, 5], 10),
    ([2, 2, 2, 1], 4),
    ([7, 1, 6, 1, 5], 12),
    ([], 4),
]


@checker
def check_next_slot(answer) -> str:
    """Exercise 1: `answer(pages, num_computed, free, page_size)` is the next token's slot; it may take a page."""
    for pages, num_computed, free, page_size in (*SLOTS, *drawn(_slot)):
        where = f"for pages = {pages}, num_computed = {num_computed}, free = {free}, page_size = {page_size}"
        given_pages, given_free = list(pages), list(free)
        slot = answer(given_pages, num_computed, given_free, page_size)
        if slot is None:
            raise NotYet("next_slot returns None: write its body.")
        needs = num_computed == len(pages) * page_size
        if needs and not free:
            if slot != -1:
                raise NotYet(f"{where}, the slot is {slot}; there is no page for it, so it must be -1.")
            if given_pages != pages or given_free != free:
                raise NotYet(f"{where}, there is no page: nothing must change, and pages are {given_pages}.")
            continue
        want_pages, want_free = (pages + free[-1:], free[:-1]) if needs else (pages, free)
        exact = want_pages[num_computed // page_size] * page_size + num_computed % page_size
        if not needs and len(given_pages) > len(pages):
            raise NotYet(f"{where}, a page is taken, and the last one still has room.")
        if needs and given_pages == pages:
            raise NotYet(f"{where}, all pages are full, and none is taken: it must be added to pages.")
        if given_pages != want_pages:
            raise NotYet(f"{where}, pages are {given_pages} afterwards; they must be {want_pages}: the last of free.")
        if given_free != want_free:
            raise NotYet(f"{where}, free is {given_free} afterwards: a page is in use and free at the same time.")
        if slot != exact:
            hint = {
                want_pages[num_computed // page_size]: "that is the page; the slot counts tokens.",
                num_computed: "that is the position in the sequence; its pages are anywhere.",
                exact + 1: "places in a page are counted from 0.",
            }.get(slot, "which page, and which place in it?")
            raise NotYet(f"{where}, the slot is {slot}; it must be {exact}: {hint}")
    return "Page times page size plus place: what write_kv stores by."


@checker
def check_share_out(answer) -> str:
    """Exercise 4: `answer(uncomputed, budget)` is how many tokens of each request the next step computes."""
    for uncomputed, budget in (*STEPS, *drawn(_asked)):
        where = f"for uncomputed = {uncomputed}, budget = {budget}"
        given = answer(list(uncomputed), budget)
        if given is None:
            raise NotYet("share_out returns None: write its body.")
        try:
            given = [int(count) for count in given]
        except (TypeError, ValueError) as error:
            raise NotYet(f"{where}, the answer is {given!r}; it must be a list of numbers.") from error
        if len(given) != len(uncomputed):
            raise NotYet(f"{where}, the answer is {given}: one number for each request, 0 for those left out.")
        if min(given, default=0) < 0:
            raise NotYet(f"{where}, the answer is {given}: nobody computes fewer than 0 tokens.")
        if any(count > most for count, most in zip(given, uncomputed, strict=True)):
            raise NotYet(f"{where}, the answer is {given}: somebody computes more tokens than it has.")
        if any(most == 1 and count == 0 for count, most in zip(given, uncomputed, strict=True)):
            raise NotYet(f"{where}, the answer is {given}: somebody who decodes is left out, behind a prompt.")
        if sum(given) > budget:
            raise NotYet(f"{where}, the answer is {given}: {sum(given)} tokens are more than the budget.")
        if sum(given) < min(budget, sum(uncomputed)):
            raise NotYet(f"{where}, the answer is {given}: {sum(given)} tokens, and there is budget for more.")
        if given != (exact := _shared_out(uncomputed, budget)):
            raise NotYet(f"{where}, the answer is {given}; it must be {exact}: prompts in the order of arrival.")
    return "First what is reserved for those who decode, then the prompts, each as much as is left."


@checker
def check_let_go(answer) -> str:
    """Exercise 3: `answer(pages, references, free)` takes a reference off each page, or changes nothing."""
    for pages, references, free in (*HELD, *drawn(_held), *TWICE):
        where = f"for pages = {pages}, references = {references}, free = {free}"
        before = list(pages)
        after, books = list(references), list(free)
        try:
            given = answer(before, after, books)
        except ValueError as error:
            raise NotYet(f"{where}, it raises ValueError, and each page is held as often as it is let go.") from error
        want = [count - pages.count(page) for page, count in enumerate(references)]
        want_free = free + [page for page in reversed(dict.fromkeys(pages)) if want[page] == 0]
        if after == references and books == free and pages:
            said = "returns something, and must change references and free" if given is not None else "changes nothing"
            raise NotYet(f"{where}, let_go {said}: write its body.")
        if before != pages:
            raise NotYet(f"{where}, it changes the sequence's own list, to {before}.")
        if after != want:
            raise NotYet(f"{where}, references are {after} afterwards; they must be {want}.")
        if sorted(books) != sorted(want_free):
            held = [page for page in books if want[page]]
            hint = "a page that nobody holds is lost"
            if len(set(books)) < len(books):
                hint = f"page {max(books, key=books.count)} is in free twice, and two sequences would get it"
            if held:
                hint = f"page {held[0]} is in free, and somebody holds it"
            raise NotYet(f"{where}, free is {books} afterwards: {hint}.")
        if books != want_free:
            raise NotYet(f"{where}, free is {books} afterwards; it must be {want_free}: the sequence's end goes first.")
    _refuses(answer, [0, 1], [1, 0, 1], [1])
    _refuses(answer, [2, 1, 0], [1, 0, 1], [1])
    _refuses(answer, [0, 0], [1, 1], [])
    return "A page that is let go twice is handed to two sequences; refusing it finds the bug where it is."


def _slot(rng):
    pages, page_size = rng.permutation(20).tolist(), int(rng.integers(1, 9))
    held = int(rng.integers(1, 9))
    return (
        pages[:held],
        held * page_size - int(rng.integers(0, page_size)),
        pages[12 : 12 + rng.integers(0, 3)],
        page_size,
    )


def _asked(rng):
    uncomputed = (rng.integers(1, 9, 6) * rng.integers(0, 2, 6) + 1).tolist()
    return uncomputed, int(rng.integers(uncomputed.count(1), 30))


def _held(rng):
    references, pages = rng.integers(0, 4, 8), rng.permutation(8)
    free = pages[references[pages] == 0].tolist()
    return pages[references[pages] > 0][: rng.integers(1, 5)].tolist(), references.tolist(), free


def _shared_out(uncomputed, budget: int) -> list[int]:
    left, counts = budget - sum(most == 1 for most in uncomputed), []
    for most in uncomputed:
        counts.append(1 if most == 1 else min(most, left))
        left -= 0 if most == 1 else counts[-1]
    return counts


def _refuses(answer, pages, references, free):
    """Raises NotYet unless `answer` raises ValueError for this and leaves everything as it was."""
    where = f"for pages = {pages}, references = {references}"
    books = copy.deepcopy((pages, references, free))
    unheld = next(page for page in pages if references[page] < pages.count(page))
    times = f"page {unheld} is let go {pages.count(unheld)} time(s) and held {references[unheld]}"
    try:
        with np.errstate(all="ignore"):
            answer(*books)
    except ValueError:
        if books != (pages, references, free):
            raise NotYet(f"{where}, {times}: ValueError is right, but something was changed before it.") from None
        return
    except Exception as error:
        raise NotYet(f"{where}, {times}: raise ValueError, not {type(error).__name__}.") from error
    raise NotYet(f"{where}, {times}: it must raise ValueError.")


# Exercise 2: a scheduler to repair ------------------------------------------------------------------------------------

TRACES = (  # Pages, tokens a page, budget, (prompt, new tokens) of the requests in the order of arrival.
    (4, 4, 8, ((5, 3), (3, 4))),
    (4, 4, 6, ((6, 9), (5, 4), (3, 3))),
    (6, 2, 5, ((3, 8), (4, 7), (2, 9), (5, 2))),
    (8, 4, 12, ((10, 12), (9, 14), (3, 20), (12, 3), (1, 18), (6, 6))),
    (5, 3, 7, ((4, 10), (4, 10), (4, 10), (4, 10))),
)
STEPS_MOST = 400  # The longest of these traces takes a right scheduler fewer than 60 steps.


class Asked:
    """A request of an exercise: how many tokens it has, how many of them are computed, and its pages."""

    def __init__(self, number: int, prompt: int, wanted: int):
        self.number, self.tokens, self.left = number, prompt, wanted
        self.computed, self.pages = 0, []

    def __repr__(self):
        return f"request {self.number}"


@checker
def check_scheduler(answer) -> str:
    """Exercise 2: `answer(num_pages, page_size, budget)` is a scheduler, which serves whole traces here."""
    for num_pages, page_size, budget, lengths in TRACES:
        requests = [Asked(i, *pair) for i, pair in enumerate(lengths)]
        scheduler = answer(num_pages, page_size, budget)
        for request in requests:
            scheduler.submit(request)
        where = f"With {num_pages} pages of {page_size} tokens, a budget of {budget} and {len(requests)} requests"
        cache = {}  # Each place of the pages: the (request, token) that it holds.
        for step in range(STEPS_MOST):
            if not any(request.left for request in requests):
                break
            _serve_step(scheduler, requests, cache, num_pages, page_size, budget, f"{where}, in step {step}")
        if late := [request for request in requests if request.left]:
            raise NotYet(f"{where}, {late[0]} has not ended after {STEPS_MOST} steps: who may lose its pages?")
    return "The last to arrive gives way, forgets what it lost, and is the first to come back: so all of them end."


def _serve_step(scheduler, requests, cache, num_pages: int, page_size: int, budget: int, where: str) -> None:
    """Runs one step of a scheduler, and raises NotYet for the first promise that it breaks."""
    chunks = [(request, int(count)) for request, count in scheduler.schedule()]
    _require_books(requests, scheduler.free, num_pages, page_size, chunks, where)
    if not chunks:
        raise NotYet(f"{where}, nothing is computed, and requests wait.")
    if sum(count for _, count in chunks) > budget:
        raise NotYet(f"{where}, {sum(count for _, count in chunks)} tokens are more than the budget.")
    numbers = [request.number for request, _ in chunks]
    if len(set(numbers)) < len(numbers):
        raise NotYet(f"{where}, {requests[max(numbers, key=numbers.count)]} takes part twice.")
    first_waiting = min((request.number for request in requests if request.left and not request.pages), default=None)
    if first_waiting is not None and max(numbers) > first_waiting:
        raise NotYet(
            f"{where}, {requests[first_waiting]} waits without pages, and {requests[max(numbers)]}, which arrived "
            "later, is served: whoever gave up its pages comes back first."
        )
    for request, count in chunks:
        for i in range(request.computed):
            place = request.pages[i // page_size], i % page_size
            if cache.get(place) != (request.number, i):
                raise NotYet(
                    f"{where}, {request} counts token {i} as computed, and page {place[0]} does not hold it: it gave "
                    "its pages up."
                )
        for i in range(request.computed, request.computed + count):
            cache[request.pages[i // page_size], i % page_size] = request.number, i
        request.computed += count
    for request, _ in chunks:
        if request.computed == request.tokens:  # The logits of its last token give the next one.
            request.tokens, request.left = request.tokens + 1, request.left - 1
            if not request.left:
                scheduler.finish(request)


def _require_books(requests, free, num_pages: int, page_size: int, chunks, where: str) -> None:
    """Raises NotYet unless each page is free or held once, and each chunk has its pages."""
    held = [page for request in requests for page in request.pages]
    for request, count in chunks:
        if request not in requests or not request.left:
            raise NotYet(f"{where}, {request} takes part, which has ended.")
        if not 1 <= count <= request.tokens - request.computed:
            raise NotYet(
                f"{where}, {request} computes {count} tokens; it has {request.tokens - request.computed} to compute."
            )
        if (need := -(-(request.computed + count) // page_size)) > len(request.pages):
            raise NotYet(
                f"{where}, {request} computes up to token {request.computed + count}, which takes {need} pages, and "
                f"has {len(request.pages)}."
            )
    pages = sorted([*held, *free])
    if twice := sorted({page for page in pages if pages.count(page) > 1}):
        holders = [request for request in requests if twice[0] in request.pages]
        raise NotYet(f"{where}, page {twice[0]} is in two hands: {', '.join(map(str, holders)) or 'free twice'}.")
    if len(pages) < num_pages:
        raise NotYet(f"{where}, {num_pages - len(pages)} page(s) are neither held nor free: they are lost.")
