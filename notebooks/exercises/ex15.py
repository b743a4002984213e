"""Chapter 15's exercises: rows into slots, a scheduler to repair, copies of pages, a step under a budget."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import (
    NotYet,
    checker,
    normal,
    play_kernel,
    require_answers,
    require_close,
    require_loads_together,
    run_kernel,
    speed,
    wide,
)

import cookbook

STEPS = [  # uncomputed, budget.
    ([1, 1, 1], 3), ([1, 1, 1], 8), ([10], 4), ([10, 1], 4), ([1, 10, 1], 8), ([10, 10, 1], 8), ([3, 10, 1, 1], 8),
    ([3, 2, 1, 4], 32), ([50, 1, 1, 1], 3), ([5, 5, 5], 10), ([2, 2, 2, 1], 4), ([7, 1, 6, 1, 5], 12), ([], 4),
    ([9, 1, 4, 1, 1, 6, 1, 1, 5, 1], 16),
]  # fmt: skip


# Exercise 1: rows into slots ------------------------------------------------------------------------------------------


@checker
def check_write_rows(answer) -> str:
    """Exercise 1: `answer(k_new, v_new, k_pages, v_pages, slots)` are the pages with the new rows in their slots."""
    for seed, heads, head_dim, num_pages, page_size, slots in (
        (0, 8, 128, 3, 16, (3, 17, 40, 0, 31)),
        (1, 8, 64, 5, 4, (9, -1, 2, 13, 10, 4, 500)),
        (2, 2, 64, 3, 32, (63, 95, 96, 31, -1, 32, 97, -1, 0)),
    ):
        shapes = (len(slots), heads, head_dim), (num_pages, page_size, heads, head_dim)
        new, pages = ([normal(10 * seed + i + shape[0], shape, jnp.bfloat16) for i in range(2)] for shape in shapes)
        args = *new, *pages, jnp.asarray(slots, jnp.int32)
        where = f"with pages of {page_size} tokens and slots {list(slots)}"
        try:
            out = run_kernel(answer, *args)
        except NotYet as problem:
            if not any(part in str(problem) for part in ("beyond the end", "AssertionError")):
                raise
            raise NotYet(f"{where}, a row goes beyond the cache: a slot that is none must be skipped.") from problem
        _judge_written(out, args, where)
        loads = [len(block.fetched) for block in itertools.chain(*play_kernel(answer, *args))]
        if max(loads) > 3:
            raise NotYet("a block of threads loads the rows of several tokens: one token per block.")
        if min(loads) < 3:
            raise NotYet(f"{where}, rows are loaded only once their slot was compared: load first, then compare.")
    of_size = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 8, 64), (512, 16, 8, 64)) for _ in "kv"]
    slots = jnp.asarray(np.random.default_rng(0).permutation(512 * 16)[:512], jnp.int32)
    praise = "No load waits for the slot in your source; write_kv.py says how to keep the compiler from moving them."
    return praise + speed(answer, cookbook.write_kv, *of_size, slots)


def _judge_written(out, args, where: str) -> None:
    """Raises NotYet unless `out` are the pages with the rows in their slots."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise NotYet("it must return two arrays: the pages of keys, and those of values.")
    *arrays, slots = args
    k_new, v_new, k_pages, v_pages = wide(*arrays)
    heads, slots = k_new.shape[1:], np.asarray(slots)
    page_size, rows = k_pages.shape[1], lambda pages: pages.reshape(-1, *heads)
    all_slots = range(len(rows(k_pages)))

    def stored(pages, new, slot_of=lambda slot: slot, tokens=None):
        found = rows(pages).copy()
        for token, slot in enumerate(slots):
            if (at := slot_of(slot if tokens is None else tokens[token])) in all_slots:
                found[at] = new[token]
        return found.reshape(pages.shape)

    for name, got, new, other, pages in (
        ("k_pages", out[0], k_new, v_new, k_pages),
        ("v_pages", out[1], v_new, k_new, v_pages),
    ):
        likely = (
            (pages, "no row was stored"),
            (stored(pages, other), "keys and values are in each other's place"),
            (
                stored(pages, new, tokens=range(len(slots))),
                "a row goes where its slot says, not where its token stands",
            ),
            (stored(pages, new, lambda slot: max(slot, 0)), "a token with slot -1 is padding: skip it"),
            (stored(pages, new, lambda slot: slot % len(all_slots)), "a slot that is none must be skipped"),
            (stored(pages, new, lambda slot: min(slot, len(all_slots) - 1)), "a slot beyond the cache must be skipped"),
            (stored(pages, new, lambda slot: slot // page_size), "that is the row of the page's number: use the slot"),
        )
        require_close(got, stored(pages, new), 0, f"{where}, {name}", likely)


# Exercise 3: copies of pages ------------------------------------------------------------------------------------------


@checker
def check_copy_pages(answer) -> str:
    """Exercise 3: `answer(k_pages, v_pages, sources, targets)` are the pages, some of which are copies of others."""
    for seed, page_size, heads, head_dim, sources, targets in (
        (0, 16, 8, 64, (5, 2, 7), (0, 6, 1)),
        (1, 32, 2, 128, (3, 3, 0, 6), (1, 7, 5, 2)),
        (2, 8, 4, 64, (4,), (0,)),
    ):
        k_pages, v_pages = (normal(seed + i, (8, page_size, heads, head_dim), jnp.bfloat16) for i in (10, 20))
        args = k_pages, v_pages, *(jnp.asarray(x, jnp.int32) for x in (sources, targets))
        try:
            out = run_kernel(answer, *args, copies={"load": 2, "store": 2})
        except NotYet as problem:
            if "copy_smem_to_gmem read-side operations" not in str(problem):
                raise
            raise NotYet("the kernel ends before its copies to GMEM do: wait for them.") from problem
        _judge_copied(out, args, f"with sources {list(sources)} and targets {list(targets)}")
        played = play_kernel(answer, *args)
        blocks = list(itertools.chain(*played))
        if any(block.stored or block.count("store") != 2 or block.count("load") != 2 for block in blocks):
            raise NotYet("each block copies two pages by TMA: into shared memory, and from there to GMEM.")
        require_loads_together(played)
        for block in blocks:
            first, second = (event for event in block.events if event.kind == "store")
            if first.end & second.known:
                raise NotYet("the second page leaves only once the first has: start both copies out, then wait.")
        if any(block.is_sending for block in blocks):
            raise NotYet("the kernel ends before its copies to GMEM do: wait for them.")
    return "Both pages are in flight at once, and the block ends only when they have left it."


def _judge_copied(out, args, where: str) -> None:
    """Raises NotYet unless `out` are the pages with the copies among them."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise NotYet("it must return two arrays: the pages of keys, and those of values.")
    *pages, sources, targets = args
    arrays, sources, targets = wide(*pages), np.asarray(sources), np.asarray(targets)

    def copied(pages, other=None, sources=sources, targets=targets):
        found = pages.copy()
        found[targets] = (pages if other is None else other)[sources]
        return found

    for name, got, mine, other in zip(("k_pages", "v_pages"), out, arrays, arrays[::-1], strict=True):
        likely = (
            (mine, "nothing was copied"),
            (copied(mine, sources=targets, targets=sources), "sources and targets are in each other's place"),
            (copied(mine, other), "keys and values are in each other's place"),
        )
        require_close(got, copied(mine), 0, f"{where}, {name}", likely)


# Exercise 4: a step under a budget ------------------------------------------------------------------------------------


@checker
def check_share_out(answer) -> str:
    """Exercise 4: `answer(uncomputed, budget)` is how many tokens of each request the next step computes."""

    def shared_out(uncomputed, budget, *, reserved=1):
        left, counts = budget - reserved * uncomputed.count(1), []
        for most in uncomputed:
            counts.append(1 if most == 1 else min(most, left))
            left -= 0 if most == 1 else counts[-1]
        return counts

    def in_order(uncomputed, budget):
        counts = []
        for most in uncomputed:
            counts.append(min(most, budget - sum(counts)))
        return counts

    likely = (
        (in_order, "Somebody who decodes is left out, behind a prompt."),
        (dict(reserved=2), "There is budget for more."),
        (lambda uncomputed, budget: list(uncomputed), "Together that is more than the budget."),
        (lambda uncomputed, budget: shared_out(uncomputed[::-1], budget)[::-1], "Prompts come as they arrived."),
    )
    said = "A number for each request: 1 for those who decode; then each prompt, as it arrived, has all that is left."
    require_answers(answer, STEPS, shared_out, likely, said, draw=_asked)
    return "First what is reserved for those who decode, then the prompts, each as much as is left."


def _asked(rng):
    uncomputed = (1 + rng.integers(1, 9, count := rng.integers(1, 12)) * rng.integers(0, 2, count)).tolist()
    return uncomputed, int(rng.integers(uncomputed.count(1), 30))


# Exercise 2: a scheduler to repair ------------------------------------------------------------------------------------

TRACES = (  # Pages, tokens a page, budget, (prompt, new tokens) of the requests in the order of arrival.
    (4, 4, 8, ((5, 3), (3, 4))),
    (4, 4, 6, ((6, 9), (5, 4), (3, 3))),
    (6, 2, 5, ((3, 8), (4, 7), (2, 9), (5, 2))),
    (8, 4, 12, ((10, 12), (9, 14), (3, 20), (12, 3), (1, 18), (6, 6))),
    (5, 3, 7, ((4, 10), (4, 10), (4, 10), (4, 10))),
)


class Asked:
    """A request of an exercise: how many tokens it has, how many of them are computed, and its pages."""

    def __init__(self, number: int, prompt: int, wanted: int):
        self.number, self.tokens, self.left = number, prompt, wanted
        self.computed, self.pages, self.num_pages = 0, [], 0

    def compute(self, count: int) -> bool:
        """Whether it ends with these tokens: the logits of the last token give the next one."""
        self.computed += count
        is_next = self.computed == self.tokens
        self.tokens, self.left = self.tokens + is_next, self.left - is_next
        return not self.left

    def __repr__(self):
        return f"request {self.number}"


@checker
def check_scheduler(answer) -> str:
    """Exercise 2: `answer(num_pages, page_size, budget)` is a scheduler, which serves whole traces here."""
    for num_pages, page_size, budget, lengths in TRACES:
        where = f"With {num_pages} pages of {page_size} tokens, a budget of {budget} and {len(lengths)} requests"
        scheduler, requests = answer(num_pages, page_size, budget), [Asked(i, *pair) for i, pair in enumerate(lengths)]
        for request in requests:
            scheduler.submit(request)
        for step, want in enumerate(_steps(num_pages, page_size, budget, lengths)):
            chunks = [(request, int(count)) for request, count in scheduler.schedule()]
            got = [(request.number, request.computed, count) for request, count in chunks]
            _require_books(scheduler, requests, chunks, num_pages, page_size, f"{where}, in step {step}")
            if got != want:
                raise NotYet(
                    f"{where}, step {step} computes (request, first token, tokens) {got}, and {want} is right. Who "
                    "gives its pages up, what becomes of the tokens that they held, and who comes back first?"
                )
            for request in [request for request, count in chunks if request.compute(count)]:
                scheduler.finish(request)
    return "The last to arrive gives way, forgets what it lost, and is the first to come back: so all of them end."


def _require_books(scheduler, requests, chunks, num_pages: int, page_size: int, where: str) -> None:
    """Raises NotYet unless each page is free or held once, and each chunk has its pages."""
    pages = [*scheduler.free, *(page for request in requests for page in request.pages)]
    if len(set(pages)) < len(pages):
        raise NotYet(f"{where}, page {max(pages, key=pages.count)} is in two hands, or held and free.")
    if len(pages) < num_pages:
        raise NotYet(f"{where}, {num_pages - len(pages)} page(s) are neither held nor free: they are lost.")
    for request, count in chunks:
        if (need := -(-(request.computed + count) // page_size)) > len(request.pages):
            raise NotYet(f"{where}, {request} computes tokens for {need} pages, and has {len(request.pages)}.")


def _steps(num_pages: int, page_size: int, budget: int, lengths):
    """(request, first token, tokens) of all chunks of each step of a right scheduler, which here counts pages alone."""
    running, waiting = [], [Asked(i, *pair) for i, pair in enumerate(lengths)]
    while running or waiting:
        chunks, left, goes_on = [], budget, list(running)
        while (goes_on or waiting) and left:
            request = (goes_on or waiting)[0]
            count = min(request.tokens - request.computed, left)
            need = -(-(request.computed + count) // page_size)
            others = sum(other.num_pages for other in running if other is not request)
            if need + others <= num_pages:
                (goes_on or waiting).pop(0)
                running += [] if request in running else [request]
                chunks.append((request, count))
                request.num_pages, left = need, left - count
            elif goes_on:
                loser = running.pop()
                loser.num_pages = loser.computed = 0
                waiting.insert(0, loser)
                goes_on = [other for other in goes_on if other is not loser]
            else:
                break
        yield [(request.number, request.computed, count) for request, count in chunks]
        ended = [request for request, count in chunks if request.compute(count)]
        running = [request for request in running if request not in ended]
