"""Solutions of chapter 15b's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  fold_in(jax.random.key(seed), position) => fold_in(jax.random.fold_in(jax.random.key(0), position), seed)  # Right.
  jax.random.gumbel(key, logits.shape[1:])
    => -jnp.log(-jnp.log(jax.random.uniform(key, logits.shape[1:], minval=1e-30)))
  jax.vmap(noise)(seeds, positions) => jax.vmap(noise)(jnp.arange(len(seeds)), positions)  # in another row
  jax.vmap(noise)(seeds, positions) => jax.vmap(noise)(seeds + jnp.arange(len(seeds), dtype=jnp.uint32), positions)
  jax.vmap(noise)(seeds, positions) => jax.random.gumbel(jax.random.key(seeds.sum()), logits.shape)
  def noise( => TURN[0] += 1\n\n    def noise( && key(seed) => key(TURN[0]) && def noisy( => TURN = [0]\n\n\ndef noisy(
    # twice has other noise
  key = jax.random.fold_in(jax.random.key(seed), position) => key = jax.random.key(seed)  # would repeat itself
  key = jax.random.fold_in(jax.random.key(seed), position) => key = jax.random.key(position)  # would be alike
  key = jax.random.fold_in(jax.random.key(seed), position) => key = jax.random.key(seed + position.astype(jnp.uint32))
    # a sum of the two
  key = jax.random.fold_in(jax.random.key(seed), position) => key = jax.random.key(seed ^ position.astype(jnp.uint32))
  key = jax.random.fold_in(jax.random.key(seed), position)
    => key = jax.random.key(65537 * seed + position.astype(jnp.uint32))  # is no key
  key = jax.random.fold_in(jax.random.key(seed), position)
    => key = jax.random.key(7919 * seed + 5 * position.astype(jnp.uint32))
  key = jax.random.fold_in(jax.random.key(seed), position)
    => key = jax.random.key(2**16 * seed + position.astype(jnp.uint32))
  key = jax.random.fold_in(jax.random.key(seed), position)
    => key = jax.random.key(seed + 2**20 * position.astype(jnp.uint32))
  key = jax.random.fold_in(jax.random.key(seed), position)
    => key = jax.random.fold_in(jax.random.key(0), 65537 * seed + position.astype(jnp.uint32))
  jax.random.gumbel => jax.random.normal  # is the noise Gumbel's
  jax.random.gumbel(key, logits.shape[1:]) => jnp.full(logits.shape[1:], jax.random.gumbel(key))  # changes no choice
  temperatures[:, None] * =>  # is greedy
  temperatures[:, None] * => (temperatures[:, None] > 0) *  # multiplied by the row's temperature
  logits + temperatures[:, None] * => logits / jnp.where(temperatures > 0, temperatures, 1)[:, None] +
    (temperatures[:, None] > 0) *
  lambda logits, *_: logits  # no row has noise
  lambda logits, *_: logits[0]  # it must be the same
exercise-2
  return every[computed : computed + budget] => return [tokens[i] if i < len(tokens) else ~row for i in
    range(computed, min(len(every), computed + budget))]  # Right.
  if len(every) == most: => if False:  # and never computed
  computed : computed + budget => computed:  # more than the budget
  -1 - row => -row  # would make row 0 a token
  -1 - row => -1  # as many as the budget allows
  * pending => * 1
  every[computed : computed + budget] => every[:budget]
  lambda tokens, pending, *case: [] if pending else next_tokens(tokens, pending, *case)  # need not know
  every = tokens + => tokens.append(0)\n    every = tokens[:-1] +  # changes what it is given
exercise-3
  count = most => count = most if most < 2 else 1 << most.bit_length() - 1  # Right.
  min(count, more) => count  # after its last
  max(left) => min(left)  # leaves its row empty
  count <= max(left) => True  # are in vain
  count //= 2 => count -= 1  # for no other number
  return 0 => return 1  # rounds up for itself
  need <= free => need <= free + 1
  need <= free => need <= 0
  lambda *case: 2 * steps_together(*case)
exercise-4
  except BaseException: => except KeyboardInterrupt:  # every fifth launch is refused
  except BaseException: => except Exception:  # every sixth launch is interrupted
  self.scheduler.unschedule()\n                raise => self.scheduler.unschedule()\n                return False
    # step hides it
  self.in_flight[0]\n => self.in_flight.pop(0)\n && raise\n        self.in_flight.pop(0) => raise
    # every fourth wait is interrupted
  except Exception: => except BaseException:
  except Exception: => except ZeroDivisionError:  # every ninth wait finds the device lost
  self.in_flight = []\n            self.scheduler.restart() => self.scheduler.restart()  # that was lost with the device
  is_launched = len(self.in_flight) < 2 and self.launch() => is_launched = self.launch() and 0  # must be a step ahead
  is_launched = => return\n        is_launched =  # neither launches anything nor waits
  is_launched = => raise ex15b.Refused\n        is_launched =  # the device did not raise
  lambda *args: None  # has no attribute 'step'
"""


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
