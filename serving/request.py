"""A request, the part of it that a step computes, and what a step says about it."""

import dataclasses
import functools
import math
import operator
import reprlib
import secrets
from collections.abc import Collection, Mapping
from typing import NamedTuple

from cookbook import _host
from cookbook.select.top_k import K_MAX

_NAME = "serving.Request"  # In messages.
MAX_LOGPROBS = 20  # Tokens whose log probabilities can be asked for, besides that of the chosen one.


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, how to go on from it, and what was generated so far.

    Args:
      prompt: tokens, at least one.
      max_new_tokens: how many to generate at most.
      temperature: what logits are divided by before a token is drawn by its probability, from 1e-6 to 1e6; 0 takes the
        largest.
      seed: of the draws, from 0 to 2**32 - 1: with the same one, the same prompt has the same tokens, whatever else is
        served. None draws one, which `seed` has afterwards.
      stop_tokens: the request ends with the first of these that is generated.
      top_k: tokens are drawn from the `top_k` most probable ones, of equal ones from the first; at most 2048. None:
        from all.
      top_p: after that, from the fewest most probable tokens that have this share of the probability together, and
        those equal to the last of them.
      min_p: after that, from those that have at least `min_p` times the probability of the most probable one.
      logprobs: None; or how many of the most probable tokens have their log probabilities recorded, beside the token
        that was chosen. They are those of the model: no temperature, nothing cut off.

    These cannot be changed afterwards. The fields after them are changed by the engine and read by its user.

    Raises:
      ValueError: an argument is out of range.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    stop_tokens: Collection[int] = frozenset()
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    logprobs: int | None = None
    # State.
    tokens: list[int] = dataclasses.field(init=False)  # The prompt, and what was generated.
    recorded: list["Logprobs"] = dataclasses.field(default_factory=list, init=False)  # For `logprobs_of`.
    error: Exception | None = dataclasses.field(default=None, init=False)  # Why the engine gave it up.
    is_cancelled: bool = dataclasses.field(default=False, init=False)
    pages: list[int] = dataclasses.field(default_factory=list, init=False)  # Its block table, of its first tokens.
    # The same of the layers with a window, of which the first `num_window_freed` are given back.
    window_pages: list[int] = dataclasses.field(default_factory=list, init=False)
    num_window_freed: int = dataclasses.field(default=0, init=False)
    keys: list[bytes] = dataclasses.field(default_factory=list, init=False)  # Keys of its full pages.
    num_computed: int = dataclasses.field(default=0, init=False)  # Tokens that steps so far have put into `pages`.
    num_pending: int = dataclasses.field(default=0, init=False)  # Tokens that are sampled, and not in `tokens` yet.
    num_preempted: int = dataclasses.field(default=0, init=False)
    submitted: float | None = dataclasses.field(default=None, init=False)  # Seconds of a clock.
    first_token: float | None = dataclasses.field(default=None, init=False)  # Seconds of that clock.

    def __post_init__(self):
        options = _checked(self)
        options["stop_tokens"] = frozenset(options["stop_tokens"])
        options.setdefault("seed", secrets.randbits(32))
        for name, value in options.items():
            setattr(self, f"_{name}", value)
        self.tokens = list(self.prompt)
        self._num_tokens_max = len(self.prompt) + self.max_new_tokens

    @property
    def generated(self) -> list[int]:
        """The new tokens so far, a stop token included."""
        return self.tokens[len(self.prompt) :]

    @property
    def logprobs_of(self) -> list["Logprobs"]:
        """The log probabilities of each of the new tokens, if they are wanted."""
        return self.recorded[: len(self.generated)]  # A fault may have left one without its token.

    @property
    def finish_reason(self) -> str | None:
        """ "stop" (by a stop token), "length", "error" or "cancelled"; None while the request goes on."""
        if self.error is not None:
            return "error"
        if (new := len(self.tokens) - len(self.prompt)) > 0:
            if self.tokens[-1] in self.stop_tokens:
                return "stop"
            if new >= self.max_new_tokens:
                return "length"
        return "cancelled" if self.is_cancelled else None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Those in `tokens`, and those that are pending."""
        return len(self.tokens) + self.num_pending

    @property
    def num_left(self) -> int:
        """New tokens that are not sampled yet, unless a stop token comes before."""
        return self._num_tokens_max - len(self.tokens) - self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are to be computed before the next can be sampled: 1 while it is decoding, 0 at the end."""
        num_tokens = len(self.tokens) + self.num_pending
        return num_tokens - self.num_computed if num_tokens < self._num_tokens_max else 0

    @property
    def held_pages(self) -> list[int]:
        """All pages that it holds."""
        return self.pages + self.window_pages[self.num_window_freed :]

    def forget_pages(self) -> None:
        """It holds none, and nothing of it is computed."""
        self.pages, self.window_pages, self.num_window_freed, self.num_computed = [], [], 0, 0

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether each token is the most probable one or drawn from all, without its log probability."""
        is_cut = self.top_k is not None or self.top_p < 1 or self.min_p > 0
        return self.logprobs is None and not (is_cut and self.temperature > 0)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from submission on; None until then."""
        return None if None in (self.first_token, self.submitted) else self.first_token - self.submitted


def _fixed(name: str) -> property:
    """An attribute that can be set once."""

    def set_once(request: Request, value) -> None:
        if hasattr(request, f"_{name}"):
            raise AttributeError(
                f"Request.{name} cannot be changed to {value!r}: make a new Request, or cancel this one"
            )
        setattr(request, f"_{name}", value)

    return property(operator.attrgetter(f"_{name}"), set_once)  # Steps read options often: no Python in between.


for _field in dataclasses.fields(Request):
    if _field.init:
        setattr(Request, _field.name, _fixed(_field.name))


class Chunk:
    """Tokens `start` to `end` of a request, which one step computes, or several steps one each."""

    __slots__ = ("request", "start", "end", "num_sampled", "pages")

    def __init__(self, request: Request, start: int, end: int):
        self.request, self.start, self.end = request, start, end
        # The next token is sampled of the last one that there is, and if the chunk goes on after it, of each.
        self.num_sampled = max(0, end - request.num_tokens + 1)
        self.pages = request.pages  # The request's list, which is another one once it is preempted.


@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities, where one token was chosen."""

    chosen: float
    top: Mapping[int, float]  # The most probable tokens, the best first.


class Output(NamedTuple):
    """News about a request: what came since the step that told of it before."""

    request: Request
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None  # One a token, if the request asks for them.
    finish_reason: str | None  # As `Request.finish_reason`.


def output_since(request: Request, count: int) -> Output:
    """The news about a request that had `count` tokens, prompt included, when it was told of before."""
    first, last = count - len(request.prompt), len(request.tokens) - len(request.prompt)
    logprobs = None if request.logprobs is None else tuple(request.recorded[first:last])
    return Output(request, tuple(request.tokens[count:]), logprobs, request.finish_reason)


def logprobs_of_row(found, row: int, count: int) -> Logprobs:
    """The log probabilities of a step's row (see `Sampled.logprobs`), with the `count` most probable tokens."""
    chosen, top, tokens = (array[row] for array in found)
    return Logprobs(float(chosen), dict(zip(tokens[:count].tolist(), top[:count].tolist(), strict=True)))


# Options that are one number: its kind, the least and the most, and what to do about another one.
_NUMBERS = {
    "max_new_tokens": (int, 1, math.inf, "ask for one token at least"),
    "seed": (int, 0, 2**32 - 1, "leave it out to have one drawn"),
    "top_k": (int, 1, K_MAX, "leave it out to draw from all tokens"),
    "logprobs": (int, 0, MAX_LOGPROBS, "ask for fewer, or leave it out for none"),
    "temperature": (float, 1e-6, 1e6, "0 takes the most probable token"),
    "top_p": (float, 1e-6, 1.0, "1 keeps all tokens"),
    "min_p": (float, 0.0, 1.0, "0 keeps all tokens"),
}


def _checked(request: Request) -> dict:
    """The options as Python has them. Raises a ValueError for the first one that is not supported."""
    options = {name: _tokens(name, getattr(request, name)) for name in ("prompt", "stop_tokens")}
    if not options["prompt"]:
        raise ValueError(f"{_NAME}: prompt=[]; must be at least one token: begin with the model's BOS token")
    for name, (kind, least, most, fix) in _NUMBERS.items():
        if (value := getattr(request, name)) is None and name in ("seed", "top_k", "logprobs"):
            continue
        value = options[name] = _host.option(_NAME.removeprefix("cookbook."), name, value, kind)
        is_greedy = name == "temperature" and value == 0
        if not least <= value <= most and not is_greedy:
            rule = f"from {least} to {most}" if most < math.inf else f"at least {least}"
            raise ValueError(f"{_NAME}: {name}={value}; must be {rule}: {fix}")
    return options


def _tokens(name: str, value) -> tuple[int, ...]:
    if (shape := getattr(value, "shape", (0,))) and len(shape) > 1:
        raise ValueError(
            f"{_NAME}: {name} has the shape {shape}; must be the tokens of one request: submit each row by itself"
        )
    is_list = hasattr(value, "__len__") and hasattr(value, "__iter__") and not isinstance(value, str | bytes | Mapping)
    if not is_list or not shape:
        raise ValueError(
            f"{_NAME}: {name}={reprlib.repr(value)}; must be a collection of tokens, such as [2]: encode a text with "
            "the model's tokenizer"
        )
    found = value.tolist() if hasattr(value, "tolist") else list(value)
    for i, token in enumerate(found):
        try:
            found[i] = operator.index(token if not isinstance(token, bool) else None)
        except TypeError:
            raise ValueError(
                f"{_NAME}: {name} has {reprlib.repr(token)}; must be whole numbers, the tokens of one request: convert "
                "it, or submit each of several prompts by itself"
            ) from None
    return tuple(found)
