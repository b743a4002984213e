"""Solutions of chapter 9c's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  -(-k // 64) => k // 64  # is right
  32 * -(-k // 64) * n => n * k // 2  # is padded
  -(-k // group_size) => k // group_size  # A shorter last group
  2 + has_zeros => 0 + has_zeros  # a scale of 2 bytes
  2 + has_zeros => 2  # 1 byte more
  2 + has_zeros => 2 + 2 * has_zeros  # A zero point is 1 byte
  + 2 * m * (k + n) =>  # cross memory too
  32 * -(-k // 64) * n => 64 * -(-k // 64) * n  # half a byte
exercise-2
  return 2 * lane + part, 16 * half + 4 * pair => return k // 8, 4 * (k % 8)  # the order of K
  2 * lane + part, => 4 * part + lane,  # are neighbours
  16 * half + 4 * pair => 8 * pair + 4 * half  # 16 bits apart
  16 * half + 4 * pair => 4 * pair  # is right
  lambda k: (int(np.arange(8)[2 * (k // 2 % 4) + k // 32]), 16 * (k % 2) + 4 * (k // 8 % 4))  # Right.
exercise-3
  (numbers - per_row(zeros + jnp.bfloat16(128))) => (numbers - jnp.bfloat16(136))  # to be 8
  numbers - per_row(zeros + jnp.bfloat16(128)) => numbers - jnp.bfloat16(128)  # nothing was subtracted
  numbers - per_row(zeros + jnp.bfloat16(128)) => numbers - jnp.bfloat16(128) - per_row(zeros)  # Right.
  numbers - per_row(zeros + jnp.bfloat16(128)) => numbers - jnp.bfloat16(128) + per_row(zeros)  # were added
  numbers - per_row(zeros + jnp.bfloat16(128)) => numbers - per_row(zeros + jnp.bfloat16(8))  # 120 scales too large
  numbers - per_row(zeros + jnp.bfloat16(128)) => numbers - per_row(zeros + jnp.bfloat16(136))  # both 8
  return (numbers - per_row(zeros + jnp.bfloat16(128))) * per_row(scales) =>
    return (numbers - jnp.bfloat16(128)) * per_row(scales) - per_row(zeros)  # before the scale
  return (numbers - per_row(zeros + jnp.bfloat16(128))) * per_row(scales) =>
    return (numbers - jnp.bfloat16(128)) * per_row(scales) - per_row(zeros * scales)  # rounded twice
  return (numbers - per_row(zeros + jnp.bfloat16(128))) * per_row(scales) =>
    return numbers * per_row(scales) - per_row((zeros + jnp.bfloat16(128)) * scales)  # it must be
  [low, weights(both >> 4, scales_2, zeros_2)] => [weights(both >> 4, scales_2, zeros_2), low]  # it must be
  scales[1::2], zeros[::2], zeros[1::2] => scales[::2], zeros[::2], zeros[::2]  # the numbers of its first
  scales[1::2] => scales[::2]  # the scales of its first
  zeros[1::2] => zeros[::2]  # the zero points of its first
  scales[::2], scales[1::2], zeros[::2], zeros[1::2] => scales[1::2], scales[::2], zeros[1::2], zeros[::2]
    # are exchanged
  return product(x, w, *of_steps, widen=widen) => assert x.shape[1] == 256; return product(x, w, *of_steps, widen=widen)
    # AssertionError
  product(x, w, *of_steps, widen=widen) => product(x, w, *of_steps, widen=widen, num_stages=3)  # Right.
  return product(x, w, *of_steps, widen=widen) => from unittest import mock
    \n    with mock.patch.object(plgpu, "wgmma_wait", lambda *_: None): return product(x, w, *of_steps, widen=widen)
    # wgmma_wait
  return product(x, w, *of_steps, widen=widen) => from unittest import mock
    \n    with mock.patch.object(Ring, "acquire", lambda ring, i: i % 8): return product(x, w, *of_steps, widen=widen)
    # stage
  lambda x, w, scales, zeros: x @ jnp.zeros((256, len(w)), x.dtype)  # must be a kernel
exercise-4
  (bits & 7) << 9 | (bits & 8) << 12 => (bits & 7) * 512 + (bits & 8) * 4096  # Right.
  halves * jnp.float16(2.0**14) => halves  # 2^-14 of what
  halves * jnp.float16(2.0**14) => halves * jnp.float16(2.0**13)  # is half
  halves * jnp.float16(2.0**14) => halves * jnp.float16(2.0**15)  # is twice
  (bits & 7) << 9 | (bits & 8) << 12 => (bits & 7) << 9  # the signs are missing
  (bits & 7) << 9 | (bits & 8) << 12 => bits << 9  # in the exponent
  (bits & 7) << 9 => (bits & 7) << 10  # one bit too high
  (bits & 7) << 9 | (bits & 8) << 12 => bits && halves * jnp.float16(2.0**14) => halves  # bits of the codes
  halves * jnp.float16(2.0**14) => halves * jnp.float16(2.0**7) * jnp.float16(2.0**7)  # one multiplication is enough
  halves * jnp.float16(2.0**14) => bits.astype(jnp.float16)  # by astype
  halves * jnp.float16(2.0**14) => jnp.where(bits < 8, halves, halves) * jnp.float16(2.0**14)  # by where
  halves * jnp.float16(2.0**14) => halves + halves  # added or subtracted
  bits = (bits & 7) << 9 | (bits & 8) << 12 => bits = sum((bits & 7 == i).astype(jnp.uint16) * jnp.uint16(half)
    for i, half in enumerate((0, 0x3800, 0x3C00, 0x3E00, 0x4000, 0x4200, 0x4400, 0x4600))) | (bits & 8) << 12
    && halves * jnp.float16(2.0**14) => halves  # by comparing
  bits = (bits & 7) << 9 | (bits & 8) << 12 => m = (bits & 7).astype(jnp.uint32);
    word = jnp.uint32(0x1F1E1C00) + (jnp.uint32(0x23222120) - jnp.uint32(0x1F1E1C00)) * (m >> 2);
    bits = ((word >> 8 * (m & 3)) & 63).astype(jnp.uint16) << 9 | (bits & 8) << 12
    && halves * jnp.float16(2.0**14) => halves * jnp.float16(1.0)  # from a table
  bits = (bits & 7) << 9 | (bits & 8) << 12 => one = jnp.minimum(bits & 7, 1); two = jnp.minimum(bits & 7, 2);
    bits = ((bits & 7) << 9) + 0x3600 * one + 0x200 * (two - one) | (bits & 8) << 12
    && halves * jnp.float16(2.0**14) => halves * jnp.float16(1.0)  # by comparing
  bits = (bits & 7) << 9 | (bits & 8) << 12 => m = bits & 7; more = m >> 1 & 1 | m >> 2;
    bits = (m << 9) + 0x3600 * (m & 1 | more) + 0x200 * more | (bits & 8) << 12
    && halves * jnp.float16(2.0**14) => halves * jnp.float16(1.0)  # built before the multiplication
  halves * jnp.float16(2.0**14) => halves * jnp.full(halves.shape, 2.0**14, jnp.float16)  # Right.
  halves * jnp.float16(2.0**14) => jnp.multiply(halves, 2.0**14)  # Right.
  halves * jnp.float16(2.0**14) => halves / jnp.float16(2.0**-14)  # it divides
  bits = (bits & 7) << 9 | (bits & 8) << 12 => m = bits & 7; more = m >> 1 & 1 | m >> 2; none = bits ^ bits;
    bits = (m << 9) + 0x3600 * (m & 1 | more) + 0x200 * more | (bits & 8) << 12
    && o_gmem[row] = halves * jnp.float16(2.0**14) => o_gmem[row] = halves;
    o_gmem[row] = lax.bitcast_convert_type(lax.bitcast_convert_type(
    lax.bitcast_convert_type(none, jnp.float16) * jnp.float16(2.0**14), jnp.uint16) | bits, jnp.float16)
    # is not the product
  (len(codes),) => (3,)  # reaches beyond the end
  (len(codes),) => (1,)  # never written
  lambda codes: codes.astype(jnp.float16)  # must be a kernel
"""


# %% exercise-1 needs: parameters setup
def bytes_of(m, n, k, group_size, has_zeros):
    #: return 0  # Your count.
    # BEGIN SOLUTION
    weights = 32 * -(-k // 64) * n
    groups = -(-k // group_size) * n
    return weights + (2 + has_zeros) * groups + 2 * m * (k + n)
    # END SOLUTION


ex09c.check_bytes(bytes_of)


# %% exercise-2 needs: parameters setup
def place(k):
    #: return 0, 0  # Your code: (word, lowest bit).
    # BEGIN SOLUTION
    part, pair, lane, half = k // 32, k // 8 % 4, k // 2 % 4, k % 2
    return 2 * lane + part, 16 * half + 4 * pair
    # END SOLUTION


ex09c.check_place(place)


# %% exercise-3 needs: parameters setup helpers product rung-1-code
def with_zeros(x, w, scales, zeros):
    #: def widen(packed, scales, zeros):  # Your code.
    #:     def weights(q):
    #:         numbers = lax.bitcast_convert_type(q | jnp.uint16(0x4300), jnp.bfloat16)
    #:         return (numbers - jnp.bfloat16(128 + 8)) * per_row(scales)
    #:
    #:     both = packed.astype(jnp.uint16)
    #:     return [weights(both & jnp.uint16(15)), weights(both >> 4)]
    #:
    #: return product(x, w, scales[::2], zeros[::2], widen=widen)
    # BEGIN SOLUTION
    def widen(packed, scales, scales_2, zeros, zeros_2):
        def weights(q, scales, zeros):
            numbers = lax.bitcast_convert_type(q | jnp.uint16(0x4300), jnp.bfloat16)
            return (numbers - per_row(zeros + jnp.bfloat16(128))) * per_row(scales)

        both = packed.astype(jnp.uint16)
        low = weights(both & jnp.uint16(15), scales, zeros)
        return [low, weights(both >> 4, scales_2, zeros_2)]

    of_steps = scales[::2], scales[1::2], zeros[::2], zeros[1::2]
    return product(x, w, *of_steps, widen=widen)
    # END SOLUTION


ex09c.check_zeros(with_zeros)


# %% exercise-4 needs: parameters setup
def to_half(codes):
    """e2m1 codes (N, K) as float16, K a multiple of 1,024."""

    def body(codes_gmem, o_gmem):
        row = lax.axis_index("row")
        layout = plgpu.Layout.WG_STRIDED((codes.shape[1],), 8)
        bits = plgpu.load(codes_gmem.at[row], layout=layout)
        #: # Your code: the bits of a float16, and what it is too small by.
        #: o_gmem[row] = lax.bitcast_convert_type(bits, jnp.float16)
        # BEGIN SOLUTION
        bits = (bits & 7) << 9 | (bits & 8) << 12
        halves = lax.bitcast_convert_type(bits, jnp.float16)
        o_gmem[row] = halves * jnp.float16(2.0**14)
        # END SOLUTION

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(codes.shape, jnp.float16),
        grid=(len(codes),),
        grid_names=("row",),
    )(codes)


ex09c.check_half(to_half)
