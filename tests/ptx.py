"""Carries out PTX without branches, of one block of 128 threads, in NumPy: for what the interpreter does not see, such
as what a thread's registers hold and how instructions round."""

import re

import jax.numpy as jnp
import numpy as np

THREADS = 128
E4M3 = jnp.float8_e4m3fn
U64 = np.uint64


def rounded(x, bits: int, least: int):
    """Float64 numbers with mantissas of so many `bits`, and no bit below 2^least, rounded to even."""
    unit = np.exp2(np.maximum(np.frexp(x)[1] - bits, least))
    return np.rint(x / unit) * unit


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bf16(x):
    return (rounded(x, 8, -133).astype(np.float32).view(np.uint32) >> 16).astype(U64)


# From bits to float64, and back.
FLOATS = {
    "bf16": (from_bf16, to_bf16),
    "f16": (
        lambda bits: bits.astype(np.uint16).view(np.float16).astype(np.float64),
        lambda x: x.astype(np.float16).view(np.uint16).astype(U64),
    ),
    "f32": (
        lambda bits: bits.astype(np.uint32).view(np.float32).astype(np.float64),
        lambda x: x.astype(np.float32).view(np.uint32).astype(U64),
    ),
    "e4m3": (
        lambda bits: bits.astype(np.uint8).view(E4M3).astype(np.float64),
        lambda x: np.clip(x, -448, 448).astype(E4M3).view(np.uint8).astype(U64),  # By .satfinite.
    ),
}
OF_FLOATS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "fma": lambda a, b, c: a * b + c,
}
OF_INTEGERS = OF_FLOATS | {
    "mov": lambda a: a,
    "cvt": lambda a: a,
    "cvta": lambda a: a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "min": np.minimum,
    "bfe": lambda a, start, size: a >> start & (U64(1) << size) - U64(1),
}
NO_RESULT = re.compile(r"\.reg|elect|bar\.|fence|\.pragma|$")


class Threads:
    """The registers of all threads, in 64 bits each, and the arrays that they read and write."""

    def __init__(self, arrays):
        self.arrays = [x.view(np.uint8).reshape(-1) for x in arrays]
        self.registers = {"%tid.x": np.arange(THREADS, dtype=U64)}

    def value(self, name: str):
        if name in self.registers:
            return self.registers[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0) % 2**64
        return np.full(THREADS, number, U64)

    def at(self, address: str, nbytes: int):
        """The array of an address, and where each thread's bytes begin there."""
        base, _, offset = address.strip("[] ").partition("+")
        start = self.value(base) + U64(int(offset or 0))
        return self.arrays[int(start[0] >> U64(40))], start.astype(np.int64) % 2**40 + np.arange(nbytes)[:, None]

    def load(self, targets, address: str, bits: int):
        array, at = self.at(address, bits // 8 * len(targets))
        for target, part in zip(targets, np.split(array[at].astype(U64), len(targets)), strict=True):
            self.registers[target] = sum(byte << U64(8 * i) for i, byte in enumerate(part))

    def store(self, address: str, sources, bits: int):
        array, at = self.at(address, bits // 8 * len(sources))
        words = [self.value(x) >> np.arange(0, bits, 8, dtype=U64)[:, None] for x in sources]
        array[at] = np.concatenate(words) & U64(255)

    def compute(self, name: str, kinds, target: str, sources, bits: int):
        kind = next((kind for kind in kinds if kind.removesuffix("x2") in FLOATS), None)
        values = [self.value(x) for x in sources]
        if name == "cvt" and kind:
            to, of = (kind for kind in kinds if kind != "rn")
            number = FLOATS[of][0](values[0]) if of in FLOATS else values[0].astype(np.float64)
            self.registers[target] = FLOATS[to][1](number)
        elif kind and kind.endswith("x2"):
            of, to = FLOATS[kind.removesuffix("x2")]
            halves = [to(OF_FLOATS[name](*(of(x >> U64(i) & U64(0xFFFF)) for x in values))) for i in (0, 16)]
            self.registers[target] = halves[0] | halves[1] << U64(16)
        elif kind and name in OF_FLOATS:
            of, to = FLOATS[kind]
            self.registers[target] = to(OF_FLOATS[name](*map(of, values)))
        else:
            mask = U64(2 ** (64 if "wide" in kinds else bits) - 1)
            self.registers[target] = OF_INTEGERS[name](*values) & mask

    def convert_pair(self, target: str, to: str, of: str, sources):
        """Two float32 numbers, the first to the upper half; or those of a pair."""
        width = lambda kind: U64(8 if kind == "e4m3x2" else 16)
        if len(sources) == 2:
            high, low = (FLOATS[of][0](self.value(x)) for x in sources)
        else:
            both, mask = self.value(sources[0]), (U64(1) << width(of)) - U64(1)
            high, low = (FLOATS[of.removesuffix("x2")][0](bits & mask) for bits in (both >> width(of), both))
        rounded = FLOATS[to.removesuffix("x2")][1]
        self.registers[target] = rounded(high) << width(to) | rounded(low)

    def run(self, line: str):
        opcode, rest = line.split(maxsplit=1)
        name, *kinds = opcode.split(".")
        target, *sources = (x.strip() for x in re.split(r",\s*(?![^{]*\})", rest))
        bits = max((int(kind[1:]) for kind in kinds if re.fullmatch(r"[bus]\d+", kind)), default=32)
        names = re.findall(r"%?[\w.]+", target), re.findall(r"%?[\w.]+", sources[0])
        if name == "shfl":  # The warp's first thread's.
            of_warp = self.value(sources[0]).reshape(-1, 32)[:, :1]
            self.registers[target] = of_warp.repeat(32, 1).reshape(-1)
        elif name == "cvt" and kinds[0] == "rn" and kinds[-2].endswith("x2"):
            self.convert_pair(target, *kinds[-2:], sources)
        elif name == "ld" and kinds[0].startswith("param"):
            self.registers[target] = np.full(THREADS, int(re.search(r"param_(\d+)\]", rest)[1]) << 40, U64)
        elif name == "ld":
            self.load(names[0], sources[0], bits)
        elif name == "st":
            self.store(target, names[1], bits)
        elif name == "mov" and "{" in target:
            for i, register in enumerate(names[0]):
                self.registers[register] = self.value(sources[0]) >> U64(i * bits // 2) & U64(2 ** (bits // 2) - 1)
        elif name == "mov" and "{" in sources[0]:
            low, high = map(self.value, names[1])
            self.registers[target] = low | high << U64(bits // 2)
        else:
            self.compute(name, kinds, target, sources, bits)


def run(ptx: str, *arrays: np.ndarray) -> None:
    """Runs the one kernel of `ptx`, whose parameters are `arrays`, in the order in which it first reads them; it may
    change them. All arithmetic rounds to the nearest, and subnormal numbers stay what they are, as PTX has it without
    `.ftz`; any instruction that is not listed above raises a KeyError."""
    threads = Threads(arrays)
    body = ptx[ptx.index("{\n") + 1 : ptx.rindex("ret;")]
    body = re.sub(r"// begin inline asm\s*+(?!cvt).*?// end inline asm", "", body, flags=re.DOTALL)
    for statement in body.split(";"):
        line = re.sub(r"//.*|^\s*\$.*:$|\.loc.*$", "", statement, flags=re.MULTILINE).strip()
        if not NO_RESULT.match(line):
            threads.run(line)
