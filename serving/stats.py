"""Counts and times of an engine's steps and requests: totals, and figures of each of the last ones."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from serving.request import Request

PERCENTILES = (50, 90, 99)
KEPT = 8192  # Steps, and requests, of which each has its own figures.


@dataclasses.dataclass(frozen=True)
class StepStats:
    """Counts and time of a step."""

    decode: bool  # Whether it had one token of each sequence, so that none was a longer piece of a prompt.
    num_tokens: int  # Tokens that were computed.
    num_sampled: int  # New tokens of requests.
    num_running: int
    num_waiting: int
    num_preemptions: int  # Since the step before.
    kv_utilization: float  # Share of the cache's pages that requests hold.
    # Until the step's tokens are on the host, from its scheduling or the previous step's tokens, whichever is later;
    # steps of one program have equal shares.
    seconds: float
    waited: float  # Seconds of it in which the host waited for the device; near 0 where the host is the slower one.

    @property
    def tokens_per_second(self) -> float:
        """New tokens of requests, a second."""
        return self.num_sampled / self.seconds


class Stats:
    """Totals of all steps, and the last `KEPT` steps, which iteration gives."""

    def __init__(self):
        self.num_steps = self.num_tokens = self.num_sampled = self.num_preemptions = 0
        self.num_finished: collections.Counter[str] = collections.Counter()  # Requests by their `finish_reason`.
        self.steps: collections.deque[StepStats] = collections.deque(maxlen=KEPT)
        self.times_to_first_token: collections.deque[float] = collections.deque(maxlen=KEPT)

    def __iter__(self) -> Iterator[StepStats]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def add_step(self, step: StepStats) -> None:
        self.steps.append(step)
        self.num_steps += 1
        self.num_tokens += step.num_tokens
        self.num_sampled += step.num_sampled
        self.num_preemptions += step.num_preemptions

    def add_finished(self, request: Request) -> None:
        self.num_finished[request.finish_reason] += 1
        if (seconds := request.time_to_first_token) is not None:
            self.times_to_first_token.append(seconds)

    def percentiles(self) -> dict[str, dict[str, float]]:
        """p50, p90 and p99 of the seconds of a step that decodes and of a mixed one, and of the time to first token.

        NaN where there is nothing yet.
        """
        return {
            "decode_step": percentiles_of(step.seconds for step in self.steps if step.decode),
            "mixed_step": percentiles_of(step.seconds for step in self.steps if not step.decode),
            "time_to_first_token": percentiles_of(self.times_to_first_token),
        }


def percentiles_of(values: Iterable[float]) -> dict[str, float]:
    values = list(values) or [np.nan]
    return {f"p{q}": float(value) for q, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}
