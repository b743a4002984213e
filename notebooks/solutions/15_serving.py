"""Solutions of chapter 15's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  (slot >= 0) & (slot < k_slots.shape[0]) => (slot > -1) & (k_slots.shape[0] > slot)  # Right.
  (slot >= 0) & (slot < k_slots.shape[0]) => slot < k_slots.shape[0]  # must be skipped
  (slot >= 0) & (slot < k_slots.shape[0]) => slot >= 0  # must be skipped
  (slot >= 0) & (slot < k_slots.shape[0]) => (slot > 0) & (slot < k_slots.shape[0])  # element
  (slot >= 0) & (slot < k_slots.shape[0]) => (slot >= 0) & (slot < 48)  # element
  (slot >= 0) & (slot < k_slots.shape[0]) => (slot >= 0) & (slot < 3 * k_pages.shape[1])  # element
  slot = slots_gmem[token] => slot = jnp.minimum(slots_gmem[token], k_slots.shape[0] - 1)
    # beyond the cache must be skipped
  slot = slots_gmem[token] => slot = jnp.maximum(slots_gmem[token], 0)  # is padding: skip it
  slot = slots_gmem[token] => slot = token  # not where its token stands
  k_slots[slot], v_slots[slot] = k, v => k_slots[slot], v_slots[slot] = v, k  # in each other's place
  k_slots[slot], v_slots[slot] = k, v => k_slots[slot] = k  # v_pages: no row was stored
  k_slots[slot], v_slots[slot] = k, v => pass  # must be a kernel
  load(k_gmem.at[token]) => load(k_gmem.at[0])  # element
  load(k_gmem.at[token]) => load(k_gmem)  # cannot be compiled
  grid=(num_tokens,) => grid=(3,)  # element
  k, v = load(k_gmem.at[token]), load(v_gmem.at[token])\n => pass\n && k_slots[slot], v_slots[slot] = k, v =>
    k_slots[slot], v_slots[slot] = load(k_gmem.at[token]), load(v_gmem.at[token])  # load first, then compare
  lambda k, v, *rest: write_rows(k, v, *rest)[0]  # two arrays
  lambda *args: write_rows(*args)[::-1]  # element
  lambda k, v, ks, vs, slots: (ks.reshape(-1, *k.shape[1:]).at[slots].set(k).reshape(ks.shape), vs)  # must be a kernel
exercise-2
  loser = self.running.pop() => loser = max(self.running, key=lambda other: other.number)
    \n            self.running.remove(loser)  # Right.
  loser.pages, loser.computed = [], 0 => loser.pages = []  # what becomes of the tokens
  self.waiting.insert(0, loser) => self.waiting.append(loser)  # who comes back first
  self.running.pop() => self.running.pop(0)  # Who gives its pages up
  return chunks => return []  # computes (request, first token, tokens) []
  return chunks => return [(one, one.tokens - one.computed) for one in self.running + self.waiting]  # computes
  chunks, left = [], self.budget => chunks, left = [], 10 * self.budget
  return chunks => return [chunk for chunk in chunks for _ in range(1 + (chunk[1] == 1))]
  return chunks => return [(one, 0) for one in self.waiting]
  return chunks => return None  # raised TypeError
  self.running.remove(request)\n        self.free += request.pages => self.running.remove(request)  # they are lost
  self.free += request.pages\n        request.pages = [] => self.free += request.pages  # in two hands
  (request.computed + count) // self.page_size => (request.computed + max(count - 1, 0)) // self.page_size  # computes
exercise-3
  plgpu.barrier_wait(k_full)\n => plgpu.barrier_wait(v_full)\n        plgpu.barrier_wait(k_full)\n
    && copy_out(k_smem, k.at[targets[i]])\n        plgpu.barrier_wait(v_full) => copy_out(k_smem, k.at[targets[i]])
    # Right.
  plgpu.wait_smem_to_gmem(0) => pass  # wait for them
  plgpu.wait_smem_to_gmem(0) => plgpu.wait_smem_to_gmem(1)  # wait for them
  copy_out(k_smem, k.at[targets[i]]) => copy_out(k_smem, k.at[targets[i]])\n        plgpu.wait_smem_to_gmem(0)
    # start both copies out
  plgpu.barrier_wait(k_full) => pass  # before its tiles have arrived
  plgpu.barrier_wait(v_full) => pass  # before its tiles have arrived
  plgpu.barrier_wait(v_full)\n        copy_out(v_smem, v.at[targets[i]]) => copy_out(v_smem, v.at[targets[i]])
    \n        plgpu.barrier_wait(v_full)  # before its tiles have arrived
  copy_out(v_smem, v.at[targets[i]]) => pass  # v_pages: nothing was copied
  copy_out(k_smem, k.at[targets[i]]) => copy_out(v_smem, k.at[targets[i]])  # before its tiles have arrived
  copy_in(v.at[sources[i]], v_smem, v_full) => copy_in(k.at[sources[i]], v_smem, v_full)  # in each other's place
  copy_in(v.at[sources[i]], v_smem, v_full) => copy_in(v.at[sources[0]], v_smem, v_full)  # element
  copy_in(v.at[sources[i]], v_smem, v_full) => pass && plgpu.barrier_wait(v_full)
    => copy_in(v.at[sources[i]], v_smem, v_full)\n        plgpu.barrier_wait(v_full)  # start both first
  copy_in(v.at[sources[i]], v_smem, v_full) => copy_in(v.at[sources[i]], k_smem, v_full)
    # before its tiles have arrived
  copy_in(v.at[sources[i]], v_smem, v_full) => pass && copy_out(k_smem, k.at[targets[i]]) =>
    copy_out(k_smem, k.at[targets[i]])\n        copy_in(v.at[sources[i]], v_smem, v_full)  # start both first
  copy_in(v.at[sources[i]], v_smem, v_full) => copy_in(v.at[sources[i]], v_smem, k_full)  # observed phase
  lambda k, v, sources, targets: copy_pages(k, v, targets, sources)  # in each other's place
  lambda *args: copy_pages(*args)[::-1]  # element
  lambda *args: copy_pages(*args)[0]  # two arrays
  copy_out(k_smem, k.at[targets[i]]) => k.at[targets[i]][...] = k_smem[...]  # by TMA
  lambda k, v, s, t: (k.at[t].set(k[s]), v.at[t].set(v[s]))  # must be a kernel
exercise-4
  left -= take if count > 1 else 0 => left = left - take if count > 1 else left  # Right.
  left = budget - uncomputed.count(1) => left = budget && take = 1 if count == 1 else min(count, left)
    => take = min(count, left) && if count > 1 else 0 =>  # Somebody who decodes
  lambda u, b: share_out(u[::-1], b)[::-1]  # as they arrived
  left -= take if count > 1 else 0 => left = left - take if count == 1 else 0  # A number for each request
  budget - uncomputed.count(1) => budget - 2 * uncomputed.count(1)  # budget for more
  lambda u, b: list(u)  # more than the budget
  lambda u, b: [b] * len(u)  # A number for each request
  lambda u, b: [1 if x == 1 else -1 for x in u]
  lambda u, b: [x for x in share_out(u, b) if x]
  lambda u, b: [min(x, max(1, (b - u.count(1)) // max(1, len(u) - u.count(1)))) for x in u]
  left = budget - uncomputed.count(1) => left = budget - sum(x == 1 for x in uncomputed[:6])
    # A number for each request
  lambda u, b: share_out(u, b) if len(u) < 7 else list(u)
  lambda u, b: sum(u)  # a list
"""


# %% exercise-1 needs: parameters setup
def write_rows(k_new, v_new, k_pages, v_pages, slots):
    """The pages with new keys and values: k_new, v_new (T, H, D); pages (P, page_size,
    H, D); slots (T,) int32."""
    num_tokens, width = len(k_new), k_new.shape[1] * k_new.shape[2]
    rows = lambda x: x.reshape(-1, width)  # A token's heads are one row.
    k_ref, v_ref = jax.new_ref(rows(k_pages)), jax.new_ref(rows(v_pages))

    def kernel(k_gmem, v_gmem, slots_gmem, k_slots, v_slots):
        token = lax.axis_index("token")
        layout = plgpu.Layout.WG_STRIDED((width,), width // 128)
        load = lambda row: plgpu.load(row, layout=layout, optimized=False)
        #: # Your code. So far keys alone are stored, and not where their slots say.
        #: k_slots[token] = load(k_gmem.at[token])
        # BEGIN SOLUTION
        slot = slots_gmem[token]
        k, v = load(k_gmem.at[token]), load(v_gmem.at[token])

        @pl.when((slot >= 0) & (slot < k_slots.shape[0]))
        def _():
            k_slots[slot], v_slots[slot] = k, v

        # END SOLUTION

    run = plgpu.kernel(kernel, grid=(num_tokens,), grid_names=("token",))
    run(rows(k_new), rows(v_new), slots, k_ref, v_ref)
    return [jax.freeze(ref).reshape(k_pages.shape) for ref in (k_ref, v_ref)]


ex15.check_write_rows(write_rows)


# %% exercise-2 needs: parameters setup
class Repaired:
    """Each step: whoever runs goes on, in the order of arrival; then those that wait
    start. Three lines are wrong."""

    def __init__(self, num_pages, page_size, budget):
        self.free, self.page_size, self.budget = (
            list(range(num_pages)),
            page_size,
            budget,
        )
        self.running, self.waiting = [], []

    def submit(self, request):
        self.waiting.append(request)

    def schedule(self):
        chunks, left = [], self.budget
        for request in list(self.running):
            count = min(request.tokens - request.computed, left)
            if request in self.running and count and self.grow(request, count):
                chunks.append((request, count))
                left -= count
        while self.waiting and left:
            request = self.waiting[0]
            count = min(request.tokens - request.computed, left)
            if not self.take_pages(request, count):
                break
            self.running.append(self.waiting.pop(0))
            chunks.append((request, count))
            left -= count
        return chunks

    def grow(self, request, count):
        while not self.take_pages(request, count):
            #: loser = self.running.pop(0)
            # BEGIN SOLUTION
            loser = self.running.pop()  # The youngest.
            # END SOLUTION
            self.free += loser.pages
            #: loser.pages = []
            #: self.waiting.append(loser)
            # BEGIN SOLUTION
            loser.pages, loser.computed = [], 0
            self.waiting.insert(0, loser)  # It arrived before all that wait.
            # END SOLUTION
            if loser is request:
                return False
        return True

    def take_pages(self, request, count):
        need = -(-(request.computed + count) // self.page_size) - len(request.pages)
        if need > len(self.free):
            return False
        request.pages = request.pages + [self.free.pop() for _ in range(need)]
        return True

    def finish(self, request):
        self.running.remove(request)
        self.free += request.pages
        request.pages = []


ex15.check_scheduler(Repaired)


# %% exercise-3 needs: parameters setup
def copy_pages(k_pages, v_pages, sources, targets):
    """Pages (P, page_size, H, D), of which page targets[i] is now a copy of page
    sources[i]; no page is in both lists."""
    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)
    copy_in, copy_out = plgpu.copy_gmem_to_smem, plgpu.copy_smem_to_gmem

    def kernel(sources, targets, k, v, k_smem, v_smem, k_full, v_full):
        i = lax.axis_index("pair")
        #: # Your code. So far only the page of keys is copied.
        #: copy_in(k.at[sources[i]], k_smem, k_full)
        #: plgpu.barrier_wait(k_full)
        #: copy_out(k_smem, k.at[targets[i]])
        #: plgpu.wait_smem_to_gmem(0)
        # BEGIN SOLUTION
        copy_in(k.at[sources[i]], k_smem, k_full)
        copy_in(v.at[sources[i]], v_smem, v_full)
        plgpu.barrier_wait(k_full)
        copy_out(k_smem, k.at[targets[i]])
        plgpu.barrier_wait(v_full)
        copy_out(v_smem, v.at[targets[i]])
        plgpu.wait_smem_to_gmem(0)
        # END SOLUTION

    page = plgpu.SMEM(k_pages.shape[1:], k_pages.dtype)
    full = plgpu.Barrier()
    run = plgpu.kernel(
        kernel,
        grid=(len(sources),),
        grid_names=("pair",),
        scratch_types=dict(k_smem=page, v_smem=page, k_full=full, v_full=full),
    )
    run(sources, targets, k_ref, v_ref)
    return [jax.freeze(ref) for ref in (k_ref, v_ref)]


ex15.check_copy_pages(copy_pages)


# %% exercise-4 needs: parameters setup
def share_out(uncomputed, budget):
    #: return None  # Your code.
    # BEGIN SOLUTION
    left = budget - uncomputed.count(1)
    counts = []
    for count in uncomputed:
        take = 1 if count == 1 else min(count, left)
        left -= take if count > 1 else 0
        counts.append(take)
    return counts
    # END SOLUTION


ex15.check_share_out(share_out)
