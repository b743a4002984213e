"""The values of the formats on number lines: scaled to the same largest value, and all of them on a log axis."""

import jax.numpy as jnp
import numpy as np

from figures._draw import save
from lab import plot

FORMATS = (
    ("int8", jnp.int8, plot.COLOURS[2]),
    ("float8_e4m3fn", jnp.float8_e4m3fn, plot.OURS),
    ("float8_e5m2", jnp.float8_e5m2, plot.BOUND),
    ("bfloat16", jnp.bfloat16, plot.PEER),
)


def values(dtype) -> np.ndarray:
    """Every positive finite value of an 8- or 16-bit format, in order."""
    bits = jnp.dtype(dtype).itemsize * 8
    with np.errstate(invalid="ignore"):  # Some are NaN.
        every = np.arange(2**bits, dtype=f"uint{bits}").view(dtype).astype(np.float64)
    return np.unique(every[np.isfinite(every) & (every > 0)])


def draw():
    """The linear axis shows each format scaled so that its largest value is 1: that is what a scale does."""
    with plot.figure(height=4.6, nrows=2) as (fig, (linear, log)):
        for row, (_, dtype, colour) in enumerate(FORMATS):
            line = values(dtype)
            for ax, points in ((linear, line / line[-1]), (log, line)):
                if len(points) < 1000:
                    ax.plot(points, np.full(len(points), row), "|", color=colour, markersize=15, markeredgewidth=0.9)
                else:  # Too many to tell apart.
                    start = 0.0 if ax is linear else points[0]
                    ax.plot((start, points[-1]), (row, row), color=colour, linewidth=11, solid_capstyle="butt")
        names = [name for name, _, _ in FORMATS]
        for ax in (linear, log):
            ax.set_yticks(range(len(names)), names)
            ax.set_ylim(len(names) - 0.25, -0.6)
            ax.grid(axis="y", visible=False)
            ax.tick_params(axis="y", length=0)
        linear.set(xlim=(-0.01, 1.01), title="Positive values, the largest of each format scaled to 1")
        log.set(xscale="log", xlim=(1e-8, 1e6), title="The same, unscaled, on a logarithmic axis")
        text = "bfloat16 goes on to 1e-40 and 3e38, with 128 values from one power of 2 to the next"
        log.text(2e-8, 3.52, text, fontsize=7.5, va="center")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
