"""The recorded timelines, each as a drawing whose spans say their name and time, and as a Chrome trace."""

import html
import json
from pathlib import Path

import lab
from lab import plot, results

LANE, HEAD, LEFT, WIDTH = 44, 30, 130, 1600  # Pixels of a drawing.


def recorded() -> list[str]:
    """The problems that have a timeline, in the order of the course."""
    files = (path for gpu in ("h200", "h100") for path in (results.ROOT / gpu / "timelines").glob("*.json.gz"))
    return sorted({path.name.removesuffix(".json.gz").replace("__", "/", 1) for path in files})


def write(folder: Path) -> None:
    """Writes each timeline into `folder`, as `<chapter>__<name>.svg` and `.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    for problem in recorded():
        stem = problem.replace("/", "__")
        (folder / f"{stem}.svg").write_text(drawing(problem))
        (folder / f"{stem}.json").write_text(json.dumps(lab.chrome_trace(problem)))


def of_chapter(chapter: str) -> str:
    """Links to the timelines of a chapter, as Markdown; empty if it has none."""
    lines = []
    for problem in recorded():
        if problem.startswith(f"{chapter}/"):
            name, path = problem.partition("/")[2].replace("_", " "), f"../traces/{problem.replace('/', '__')}"
            gpu = results.gpus(lab.chrome_trace(problem)["otherData"])
            lines.append(
                f'<li>{html.escape(name)}, {gpu}: <a href="{path}.svg">look at each span</a> or '
                f'<a href="{path}.json" download>download the Chrome trace</a></li>'
            )
    return f"**Timelines of this chapter**\n\n<ul>{''.join(lines)}</ul>" if lines else ""


def drawing(problem: str) -> str:
    """An SVG of the trace: a lane for each warpgroup, and under the pointer the name and the time of a span."""
    events = lab.chrome_trace(problem)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["name"] != "Init"]
    lanes = sorted({(event["pid"], event["tid"]) for event in events})
    names = list(dict.fromkeys(span["name"] for span in spans))
    end = max((span["ts"] + span["dur"] for span in spans), default=1.0)
    scale, height = (WIDTH - LEFT) / end, HEAD + LANE * len(lanes) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="13"><title>{html.escape(problem)}</title><rect width="100%" height="100%" fill="{plot.CARD}"/>'
    ]
    for i, name in enumerate(names):
        parts.append(f'<rect x="{LEFT + 130 * i}" y="8" width="12" height="12" fill="{_colour(i)}"/>')
        parts.append(f'<text x="{LEFT + 130 * i + 18}" y="19">{html.escape(name)}</text>')
    for row, (block, warpgroup) in enumerate(lanes):
        y = HEAD + LANE * row
        parts.append(f'<text x="6" y="{y + 24}">block {block}, wg {warpgroup}</text>')
        for span in spans:
            if (span["pid"], span["tid"]) == (block, warpgroup):
                x, width = LEFT + scale * span["ts"], max(scale * span["dur"], 0.5)
                said = f"{span['name']}: {span['dur']:.3f} µs, from {span['ts']:.3f} µs on"
                look = f'fill="{_colour(names.index(span["name"]))}" stroke="{plot.CARD}" stroke-width="0.4"'
                place = f'x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="{LANE - 10}"'
                parts.append(f"<rect {place} {look}><title>{html.escape(said)}</title></rect>")
    return "".join([*parts, "</svg>"])


def _colour(i: int) -> str:
    return plot.COLOURS[i % len(plot.COLOURS)]
