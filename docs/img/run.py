"""Draws run.svg from a recorded run: what its terminal showed when it had done a step.

python docs/img/run.py runs/demo-... [--step 100]
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fsdp_jobs.cli.follow import progress_line
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import Submitted, read_events
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.tail import read_json_lines

WIDTH = 112


def until(path: Path, moment: float) -> list[dict[str, Any]]:
    return [record for record in read_json_lines(path) if record["time"] <= moment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=100)
    args = parser.parse_args()
    recorded = RunDir(args.run)
    moment = max(m["time"] for m in read_json_lines(recorded.metrics) if m["step"] == args.step)
    with tempfile.TemporaryDirectory() as folder:
        cut = RunDir(Path(folder) / recorded.name)
        cut.path.mkdir()
        shutil.copy(recorded.config, cut.config)
        for source, target in ((recorded.events, cut.events), (recorded.metrics, cut.metrics)):
            target.write_text("".join(json.dumps(record) + "\n" for record in until(source, moment)))
        status = RunStatus(cut)
        status.update()
        happened = list(read_events(cut))
    console = Console(record=True, width=WIDTH, force_terminal=True, highlight=False, file=io.StringIO())
    for event in happened:
        if isinstance(event, Submitted):
            console.print(f"submitted {event.handle}\nrun directory runs/{recorded.name}", markup=False)
        if sentence := event.sentence():
            stamp = time.strftime("%H:%M:%S", time.localtime(event.time))
            console.print(Text.assemble((f"{stamp} ", "dim"), (sentence, event.style)))
    status.committed_at += time.time() - moment  # ages are counted to now
    console.print(progress_line(status))
    title = f"python -m fsdp_jobs name={recorded.name} fsdp=hybrid_shard"
    drawn = console.export_svg(title=title)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # the reader's own fonts, none from the net
    Path(__file__).with_name("run.svg").write_text(svg.replace("Fira Code", "ui-monospace, Menlo, Consolas"))


if __name__ == "__main__":
    main()
