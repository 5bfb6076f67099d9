"""Draw run.svg from a recorded run: its terminal as it was, shortened to 20 seconds, as an animated SVG.

python examples/demo.py; python docs/img/run.py runs/demo-...
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI
from rich.text import Text

from fsdp_jobs.cli.follow import progress, summary
from fsdp_jobs.config import terminal
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import Event, Submitted, read_events
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.tail import read_json_lines
from fsdp_jobs.submit.overview import summary_of

WIDTH = 118  # characters
CELL, LINE = 8.4, 19  # pixels
SECONDS, FRAMES, REST = 20.0, 50, 5.0  # of the film, of its live line, at its end

console = Console(width=WIDTH, force_terminal=True, color_system="truecolor", highlight=False, file=io.StringIO())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    recorded = RunDir(parser.parse_args().run)
    happened = list(read_events(recorded))
    began, ended = happened[0].time, happened[-1].time + 1
    film = SECONDS + REST

    def shown_at(moment: float) -> float:
        """From seconds since 1970 to the part of the film at which something appears."""
        return (0.5 + (SECONDS - 0.5) * (moment - began) / (ended - began)) / film

    lines: list[tuple[RenderableType, float]] = [(Text(f"$ fsdp-jobs name={recorded.name} fsdp=hybrid_shard"), 0.0)]
    lines += [(line, shown_at(event.time)) for event in happened for line in told(event, recorded.name)]
    last = status_at(recorded, ended)
    lines += [(Text.from_ansi(line), SECONDS / film) for line in ending(last)]
    frames = [began + (ended - began) * i / FRAMES for i in range(FRAMES + 1)]
    drawn = []
    for y, (line, appears) in enumerate(lines):
        drawn += text_of(line, y, f"0;{appears:.4f}" if appears else "", "0;1")
    changes = [*sorted({appears for _, appears in lines}), 1.0]
    for moment, following in itertools.pairwise(frames):
        begin, end = shown_at(moment), min(shown_at(following), SECONDS / film)
        live = progress(summary_of(status_at(recorded, moment), recorded.read_job(), None))
        edges = [begin, *(c for c in changes if begin < c < end), end]
        for since, until in itertools.pairwise(edges):  # below the lines that are there by then
            y = sum(appears <= since for _, appears in lines)
            drawn += text_of(live, y, f"0;{since:.4f};{until:.4f}", "0;1;0")
    height = (len(lines) + 2) * LINE + 40
    Path(__file__).with_name("run.svg").write_text(frame_of(drawn, WIDTH * CELL + 32, height, film))


def until(path: Path, moment: float) -> list[dict[str, Any]]:
    return [record for record in read_json_lines(path) if record["time"] <= moment]


def status_at(recorded: RunDir, moment: float) -> RunStatus:
    """What was known of the run then."""
    with tempfile.TemporaryDirectory() as folder:
        cut = RunDir(Path(folder) / recorded.name)
        cut.path.mkdir()
        shutil.copy(recorded.config, cut.config)
        shutil.copytree(recorded.path / "attempts", cut.path / "attempts")
        for source, target in ((recorded.events, cut.events), (recorded.metrics, cut.metrics)):
            target.write_text("".join(json.dumps(record) + "\n" for record in until(source, moment)))
        status = RunStatus(cut)
        status.update()
        status.committed_at += time.time() - moment  # ages are counted to now
        return status


def told(event: Event, name: str) -> Iterator[RenderableType]:
    if isinstance(event, Submitted):
        yield Text(f"submitted {event.handle}")
        yield Text(f"run directory runs/{name}")
    if sentence := event.sentence():
        stamp = time.strftime("%H:%M:%S", time.localtime(event.time))
        yield Text.assemble((f"{stamp} ", "dim"), (sentence, event.style))


def ending(status: RunStatus) -> list[str]:
    with mock.patch.object(terminal, "console", console), console.capture() as printed:
        summary(status)
    return [line for line in printed.get().splitlines() if "/tmp" not in line]


def text_of(line: RenderableType, row: int, key_times: str, values: str) -> Iterator[str]:
    """Yield a row of the terminal, visible for a part of the film; without animation the last state is seen."""
    spans = []
    for segment in console.render_lines(line, pad=False)[0]:
        style = segment.style
        colour = style.color.get_truecolor(MONOKAI) if style and style.color else MONOKAI.foreground_color
        dim = ' opacity="0.6"' if style and style.dim else ""
        bold = ' font-weight="700"' if style and style.bold else ""
        if segment.text.strip():
            spans.append(f'<tspan fill="{colour.hex}"{dim}{bold}>{escape(segment.text)}</tspan>')
        else:
            spans.append(segment.text)
    hidden = ' opacity="0"' if values.endswith("0") else ""
    animated = ""
    if key_times:
        animated = f'<animate attributeName="opacity" values="{values}" keyTimes="{key_times}"/>'
    yield f'<text x="16" y="{56 + row * LINE}"{hidden}>{"".join(spans).rstrip()}{animated}</text>'


def frame_of(drawn: list[str], width: float, height: float, film: float) -> str:
    timing = f'calcMode="discrete" dur="{film:g}s" repeatCount="indefinite"'
    body = "\n".join(drawn).replace("<animate ", f"<animate {timing} ")
    colours = enumerate(("#ff5f57", "#febc2e", "#28c840"))
    dots = "".join(f'<circle cx="{20 + 20 * i}" cy="20" r="6" fill="{colour}"/>' for i, colour in colours)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">
<title>A run in the terminal: a node is killed, and the job restarts from its newest checkpoint</title>
<rect width="{width:g}" height="{height:g}" rx="8" fill="#1d1f21"/>{dots}
<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" xml:space="preserve">
{body}
</g>
</svg>
"""


if __name__ == "__main__":
    main()
