"""Solutions of chapter 15b's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
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
exercise-2
  mixed(mixed(token) ^ key) => mixed(token ^ mixed(key + jnp.uint32(77)))  # Right.
  mixed(mixed(seeds_gmem[row]) ^ positions_gmem[row].astype(jnp.uint32)) =>
    mixed(mixed(positions_gmem[row].astype(jnp.uint32) + jnp.uint32(5)) + seeds_gmem[row])
  mixed(seeds_gmem[row]) => mixed(row.astype(jnp.uint32))  # in another row
  mixed(mixed(seeds_gmem[row]) => mixed(mixed(seeds_gmem[row] + row.astype(jnp.uint32))
  seeds_gmem[row] => seeds_gmem[0]
  mixed(mixed(seeds_gmem[row]) => mixed(jnp.uint32(rows) + mixed(seeds_gmem[row])  # when others share its step
  def kernel( => TURN[0] += 1\n    turn = TURN[0]\n\n    def kernel( && mixed(seeds_gmem[row]) =>
    mixed(jnp.uint32(turn)) && def noisy( => TURN = [0]\n\n\ndef noisy(  # twice has other noise
  ^ positions_gmem[row].astype(jnp.uint32) =>  # would repeat itself
  mixed(mixed(seeds_gmem[row]) ^ => mixed(mixed(jnp.uint32(7)) ^  # would be alike
  mixed(mixed(seeds_gmem[row]) ^ => mixed(seeds_gmem[row] +  # a sum of the two
  mixed(mixed(seeds_gmem[row]) ^ => mixed(seeds_gmem[row] ^
  mixed(mixed(seeds_gmem[row]) ^ => mixed(seeds_gmem[row] *
  mixed(mixed(seeds_gmem[row]) ^ => mixed(jnp.uint32(65537) * seeds_gmem[row] +
  mixed(mixed(seeds_gmem[row]) ^ => mixed(jnp.uint32(2**16) * seeds_gmem[row] +
  mixed(mixed(seeds_gmem[row]) ^ => mixed(jnp.uint32(7919) * seeds_gmem[row] + jnp.uint32(5) *
  mixed(mixed(token) ^ key) => mixed(token + mixed(seeds_gmem[row]) + positions_gmem[row].astype(jnp.uint32))
    # in other places
  mixed(mixed(token) ^ key) => mixed(token ^ mixed(seeds_gmem[row]) ^ positions_gmem[row].astype(jnp.uint32))
  (piece * block + place) => place  # the same noise as another token
  (piece * block + place) => (jnp.where(piece > 0, block, 0) + place)
  (piece * block + place) => (piece % 2 * block + place)
  mixed(mixed(token) ^ key) => mixed(mixed(token) ^ key) * jnp.uint32(0) + key  # changes no choice
  -jnp.log(-jnp.log(uniform(bits))) => uniform(bits)  # is the noise Gumbel's
  -jnp.log(-jnp.log(uniform(bits))) => jnp.log(-jnp.log(uniform(bits)))
  -jnp.log(-jnp.log(uniform(bits))) => -jnp.log(uniform(bits))
  temperatures_gmem[row] * =>  # is greedy
  x + temperatures_gmem[row] * => x + jnp.where(temperatures_gmem[row] > 0, 1.0, 0.0) *
    # multiplied by the row's temperature
  * noise => * 0  # no row has noise
  lambda logits, temperatures, seeds, positions: scores(logits, temperatures, seeds, positions)  # must be a kernel
exercise-3
  x > m => m < x  # Right.
  jnp.where(x > m, => jnp.where(jnp.maximum(m, x) != m,
  x > m => x >= m  # smallest token
  jnp.min(jnp.where(m == jnp.max(m), token, vocabulary)) => jnp.max(jnp.where(m == jnp.max(m), token, -1))
  i * block + place, token => place, token  # its place in a piece
  -jnp.inf, jnp.float32 => 0.0, jnp.float32  # all scores are negative
  -jnp.inf, jnp.float32 => -1e4, jnp.float32
  return jnp.maximum(m, x), token => return x, token  # keep the larger one
  jnp.min(jnp.where(m == jnp.max(m), token, vocabulary)) => jnp.max(token)
  jnp.min(jnp.where(m == jnp.max(m), token, vocabulary)) => jnp.min(token)  # at the place
  vocabulary // block, step => vocabulary // block - 1, step
  vocabulary // block, step => 4, step  # with rows of
  token, vocabulary)) => token, 10_000))  # with a row of 131072
  scores_gmem.at[row, here] => scores_gmem.at[0, here]  # row 1
  m, token = lax => lax.fori_loop(0, vocabulary // block, step, start)\n        m, token = lax  # reads a row 2 times
  rows,), jnp.int32 => rows,), jnp.float32 && jnp.min(jnp.where(m == jnp.max(m), token, vocabulary)) =>
    jnp.min(jnp.where(m == jnp.max(m), token, vocabulary)).astype(jnp.float32)  # int32
  lambda scores: jnp.argmax(scores, axis=1).astype(jnp.int32)  # must be a kernel
exercise-4
  except BaseException: => except KeyboardInterrupt:  # every fifth launch is refused
  except BaseException: => except Exception:  # every sixth launch is interrupted
  except BaseException: => except (Exception, KeyboardInterrupt):  # every eighth launch ends
  self.scheduler.unschedule()\n                raise => self.scheduler.unschedule()\n                return False
    # step hides it
  self.in_flight[0]\n => self.in_flight.pop(0)\n && raise\n        self.in_flight.pop(0) => raise
    # every fourth wait is interrupted
  except Exception: => except BaseException:
  except Exception: => except ZeroDivisionError:  # every ninth wait finds the device lost
  self.in_flight = []\n            self.scheduler.restart() => self.scheduler.restart()  # that was lost with the device
  self.scheduler.restart() => self.scheduler.unschedule()  # every ninth wait finds the device lost
  is_launched = len(self.in_flight) < 2 and self.launch() => is_launched = self.launch() and 0  # must be a step ahead
  is_launched = => return\n        is_launched =  # neither launches anything nor waits
  is_launched = => raise ex15b.Refused\n        is_launched =  # the device did not raise
  lambda *args: None  # has no attribute 'step'
"""


# %% exercise-1 needs: parameters setup
def next_tokens(tokens, pending, computed, most, row, budget):
    #: return None  # Your code.
    # BEGIN SOLUTION
    every = tokens + [-1 - row] * pending
    if len(every) == most:
        return []
    return every[computed : computed + budget]
    # END SOLUTION


ex15b.check_next_tokens(next_tokens)


# %% exercise-2 needs: parameters setup sampling
def noisy(logits, temperatures, seeds, positions, block=256):
    rows, vocabulary = logits.shape
    layout = plgpu.Layout.WG_STRIDED((block,), 2)

    def kernel(logits_gmem, temperatures_gmem, seeds_gmem, positions_gmem, o_gmem):
        row, piece = lax.axis_index("row"), lax.axis_index("piece")
        here = pl.ds(piece * block, block)
        x = plgpu.load(logits_gmem.at[row, here], layout=layout, optimized=False)
        place = plgpu.broadcasted_iota(jnp.int32, (block,), 0, layout=layout)
        #: key = mixed(row.astype(jnp.uint32))  # It belongs to a row of the batch.
        #: bits = mixed(place.astype(jnp.uint32) + key)
        #: noise = uniform(bits)  # Not Gumbel's yet.
        # BEGIN SOLUTION
        key = mixed(mixed(seeds_gmem[row]) ^ positions_gmem[row].astype(jnp.uint32))
        token = (piece * block + place).astype(jnp.uint32)
        bits = mixed(mixed(token) ^ key)
        noise = -jnp.log(-jnp.log(uniform(bits)))
        # END SOLUTION
        o_gmem[row, here] = x + temperatures_gmem[row] * noise

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        grid=(rows, vocabulary // block),
        grid_names=("row", "piece"),
    )(logits, temperatures, seeds, positions)


ex15b.check_noisy(noisy)


# %% exercise-3 needs: parameters setup
def best_tokens(scores, block=256):
    rows, vocabulary = scores.shape
    layout = plgpu.Layout.WG_STRIDED((block,), 2)

    def kernel(scores_gmem, o_gmem):
        row = lax.axis_index("row")
        place = plgpu.broadcasted_iota(jnp.int32, (block,), 0, layout=layout)

        def step(i, carry):
            m, token = carry  # The best so far at each place of a piece.
            here = pl.ds(i * block, block)
            x = plgpu.load(scores_gmem.at[row, here], layout=layout, optimized=False)
            #: return jnp.maximum(m, x), token  # Your code: the token, too.
            # BEGIN SOLUTION
            token = jnp.where(x > m, i * block + place, token)
            return jnp.maximum(m, x), token
            # END SOLUTION

        nothing = jnp.full((block,), -jnp.inf, jnp.float32)
        start = plgpu.layout_cast(nothing, layout), place
        m, token = lax.fori_loop(0, vocabulary // block, step, start)
        #: o_gmem[row] = jnp.max(token)  # Your code.
        # BEGIN SOLUTION
        o_gmem[row] = jnp.min(jnp.where(m == jnp.max(m), token, vocabulary))
        # END SOLUTION

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows,), jnp.int32),
        grid=(rows,),
        grid_names=("row",),
    )(scores)


ex15b.check_best_tokens(best_tokens)


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
