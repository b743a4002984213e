"""Solutions of chapter 15b's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-1 needs: parameters setup
def noisy(logits, temperatures, seeds, positions):
    #: key = jax.random.key(0)  # One for all rows.
    #: noise = jax.random.gumbel(key, logits.shape)
    #: return logits + temperatures[:, None] * noise
    # BEGIN SOLUTION
    def noise(seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, logits.shape[1:])

    return logits + temperatures[:, None] * jax.vmap(noise)(seeds, positions)
    # END SOLUTION


ex15b.check_noisy(noisy)


# %% exercise-2 needs: parameters setup
def next_tokens(tokens, pending, computed, most, row, budget):
    #: return None  # Your code.
    # BEGIN SOLUTION
    every = tokens + [-1 - row] * pending
    if len(every) == most:
        return []
    return every[computed : computed + budget]
    # END SOLUTION


ex15b.check_next_tokens(next_tokens)


# %% exercise-3 needs: parameters setup
def steps_together(lengths, left, free, page_size, most):
    #: return None  # Your code.
    # BEGIN SOLUTION
    pages = lambda tokens: -(-tokens // page_size)
    count = most
    while count:
        need = sum(
            pages(length + min(count, more)) - pages(length)
            for length, more in zip(lengths, left, strict=True)
        )
        if need <= free and count <= max(left):
            return count
        count //= 2
    return 0
    # END SOLUTION


ex15b.check_steps_together(steps_together)


# %% exercise-4 needs: parameters setup
class Loop:
    """A step ahead of its device. It knows nothing of faults yet."""

    def __init__(self, scheduler, device):
        self.scheduler, self.device = scheduler, device
        self.in_flight = []  # (chunks, what `launch` returned), the oldest first.

    def step(self):
        is_launched = len(self.in_flight) < 2 and self.launch()
        if len(self.in_flight) > is_launched:
            self.complete()

    def launch(self):
        """Schedules a step and sends it off; whether there was anything to do."""
        if chunks := self.scheduler.schedule():
            #: launched = self.device.launch(chunks)
            # BEGIN SOLUTION
            try:
                launched = self.device.launch(chunks)
            except BaseException:  # Ctrl-C too.
                self.scheduler.unschedule()
                raise
            # END SOLUTION
            self.in_flight.append((chunks, launched))
        return bool(chunks)

    def complete(self):
        """Waits for the oldest step in flight, and enters its tokens."""
        #: chunks, launched = self.in_flight.pop(0)
        #: tokens = self.device.wait(launched)
        # BEGIN SOLUTION
        chunks, launched = self.in_flight[0]
        try:
            tokens = self.device.wait(launched)
        except Exception:  # Ctrl-C is none, and leaves the step in flight.
            self.in_flight = []
            self.scheduler.restart()
            raise
        self.in_flight.pop(0)
        # END SOLUTION
        self.scheduler.complete(chunks, tokens)


ex15b.check_loop(Loop)
