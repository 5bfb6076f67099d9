"""Implement the verbs for a user's setup: shell completion, a schema for editors, starter files. No torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_jobs.cli.main import VERBS
from fsdp_jobs.config.arguments import Parser
from fsdp_jobs.config.errors import BadInput, Problem, nearest
from fsdp_jobs.config.groups import groups
from fsdp_jobs.config.json_schema import job_schema
from fsdp_jobs.config.terminal import say
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.tools.rehearse import FAULTS

_HERE = Path(__file__).parent


def completion(args: list[str]) -> int:
    """Print a shell's completion: fixed words are part of it, names of runs are looked up by the shell."""
    parser = Parser("completion")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell = parser.parse_args(args).shell
    overrides = [f"{group}={option}" for group, options in groups().items() for option in options]
    candidates = (
        (_HERE / "completion" / "candidates.sh")
        .read_text()
        .replace("@OVERRIDES@", " ".join([*overrides, *_keys(job_schema())]))
        .replace("@NAMES@", " ".join(VERBS))
        .replace("@VERBS@", "\n".join(map(_case, VERBS)))
    )
    print((_HERE / "completion" / f"{shell}.sh").read_text().replace("@CANDIDATES@", candidates), end="", flush=True)
    return 0


def _keys(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield `key=` for every key of a schema, and `key=value` for each of its choices."""
    for name, about in schema["properties"].items():
        for form in about.get("anyOf", [about]):
            if "properties" in form:
                yield from _keys(form, f"{prefix}{name}.")
                continue
            yield f"{prefix}{name}="
            values = form.get("enum", [True, False] if form.get("type") == ["boolean"] else [])
            yield from (f"{prefix}{name}={str(v).lower() if isinstance(v, bool) else v}" for v in values)


def _case(verb: str) -> str:
    """Return the shell's case of a verb, from its line of help: its words, and whether names of runs are among them."""
    module, text = VERBS[verb]
    words = re.findall(r"(?<=\[)--?[a-z-]+", text)
    if alternatives := re.search(rf"{verb} (cluster=)?([\w-]+(?:\|[\w-]+)+)", text):
        words += [f"{alternatives[1] or ''}{word}" for word in alternatives[2].split("|")]
    if module.startswith("cli.jobs:"):
        words.append("$overrides")
    elif module.startswith("cli.runs:"):
        words.append("runs_dir=")
    names = "names=yes" if re.search(rf"{verb} \[?NAME", text) else ""
    if verb == "rehearse":
        names = f'; [ $# -gt 2 ] || words="{" ".join(FAULTS)}"'
    return f'{verb}) words="{" ".join(words)}" {names} ;;'


def schema(args: list[str]) -> int:
    """Print the JSON schema of a job."""
    Parser("schema").parse_args(args)
    print(json.dumps(job_schema(), indent=2), flush=True)
    return 0


def init(args: list[str]) -> int:
    """Write starter files into the working directory; keep an existing train.py, refuse if others exist."""
    known = sorted(file.stem for file in (_HERE / "starter").glob("*.yaml"))
    parser = Parser("init")
    parser.add_argument("cluster", nargs="?", default="cluster=local", help=f"cluster=, one of {', '.join(known)}")
    given = parser.parse_args(args).cluster
    if (cluster := given.removeprefix("cluster=")) not in known:
        what = f"init takes cluster=, one of {', '.join(known)}"
        raise BadInput.at(given, what, nearest(cluster, known))
    texts = {  # in this order: a write that fails should fail at the first file
        "conf/experiment/mine.yaml": (_HERE / "starter" / f"{cluster}.yaml").read_text(),
        "conf/job.schema.json": json.dumps(job_schema(), indent=2) + "\n",
        "train.py": (_HERE / "starter" / "train.py.txt").read_text(),
    }
    if os.path.lexists("train.py"):
        del texts["train.py"]
        say("train.py is there already: the job runs it")
    if there := [file for file in texts if os.path.lexists(file)]:
        raise BadInput(Problem(file, "is there already, and is not overwritten", "another folder") for file in there)
    for file, text in texts.items():
        write_atomic(Path(file), text)
        say(f"wrote {file}")
    say("next: edit conf/experiment/mine.yaml, then fsdp-jobs plan --config-dir conf experiment=mine")
    return 0
