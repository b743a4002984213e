"""Figures that move: a drawing of several frames, which a reader steps through.

A stepper is a generator that draws. Whatever it draws before its first `yield` stays; then each `yield caption` ends a
frame:

    @stepper(7.8, 2.0)
    def ring(ax):
        box(ax, ...)  # In all frames.
        yield
        for stage in range(3):
            arrow(ax, ...)  # In this frame alone.
            yield f"The copy into stage {stage} starts."

In a notebook and on the site the frames have buttons and answer to the arrow keys. Nothing moves by itself. Without
scripts the first frame and all captions are shown, and the file beside the other figures shows the first frame.
"""

import functools
import html
import inspect
import io
import pathlib
import re

from figures._draw import Picture, canvas, chapters, pictures
from lab import plot

SCRIPT = (pathlib.Path(__file__).parent / "stepper.js").read_text()


class Steps:
    """The drawn frames: `svg`, of which it shows the first, and their `captions`."""

    def __init__(self, name: str, title: str, svg: str, captions: list[str]):
        self.name, self.title, self.svg, self.captions = name, title, svg, captions

    def __repr__(self) -> str:
        return "\n".join(f"{i}. {caption}" for i, caption in enumerate(self.captions, 1))

    def _repr_html_(self) -> str:
        captions = "".join(f"<li>{html.escape(caption)}</li>" for caption in self.captions)
        label = html.escape(f"{self.title} {len(self.captions)} steps.", quote=True)
        svg = self.svg.replace("<svg ", '<svg aria-hidden="true" style="width:100%;height:auto" ', 1)
        return (
            f'<div class="cookbook-stepper" data-name="{self.name}" role="group" aria-label="{label}" tabindex="0" '
            f'style="max-width:56rem">{svg}<ol>{captions}</ol></div>\n<script>{SCRIPT}</script>'
        )


class Stepper(Picture):
    """A picture whose `draw()` returns `Steps`."""

    def _written(self) -> bytes:
        return self.draw().svg.encode()


def stepper(width: float, height: float):
    """Makes a stepper of a generator that draws on axes in inches: the origin at the lower left, no frame."""

    def declare(paint):
        @functools.wraps(paint)
        def draw(*args, **kwargs):
            fig, ax = canvas(width, height)
            captions = _tag(ax, paint(ax, *args, **kwargs))
            for artist in ax.get_children():
                artist.set_clip_on(False)  # Or each would name a clip path.
            drawn = io.StringIO()
            plot.save(fig, drawn)
            title = inspect.getdoc(paint).split("\n\n")[0].replace("\n", " ")
            return Steps(paint.__name__, title, _frames(drawn.getvalue(), paint.__name__), captions)

        return Stepper(draw)

    return declare


def steppers() -> list[Stepper]:
    """All of the course."""
    return [picture for chapter in chapters() for picture in pictures(chapter) if isinstance(picture, Stepper)]


def _tag(ax, frames) -> list[str]:
    """Draws all frames and gives what is drawn in frame i the group `frame_i`. Returns the captions."""
    next(frames)
    captions, seen = [], set(ax.get_children())
    for caption in frames:
        for artist in ax.get_children():
            if artist not in seen:
                seen.add(artist)
                for part in (artist, getattr(artist, "arrow_patch", None)):
                    if part is not None:
                        part.set_gid(f"frame_{len(captions)}")
        captions.append(caption)
    return captions


def _frames(svg: str, name: str) -> str:
    """The SVG with its frames as classes, all but the first hidden, and with ids that are this stepper's alone."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"\b([1-9]\d*\.\d\d)\d+", r"\1", svg)  # Numbers below 1 are scales of text, and stay.
    svg = re.sub(r"\s*\n\s*", " ", svg)
    svg = svg.replace('<g id="frame_0"', '<g class="frame" data-frame="0"')
    svg = re.sub(r'<g id="frame_(\d+)"', r'<g class="frame" data-frame="\1" style="display:none"', svg)
    used = set(re.findall(r'(?:href="|url\()#([\w-]+)', svg))
    svg = re.sub(r' id="([\w-]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", svg)
    return re.sub(r'((?:href="|url\()#)', rf"\g<1>{name}-", svg)
