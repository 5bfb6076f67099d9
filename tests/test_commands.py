"""Every command of README and docs is one: each verb, flag, override, file, target and service exists.

Commands of docs/start/ are run as well: tests/integration/test_start_page.py, and test_start_page.py of SLURM's and
Kubernetes' tests.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import runpy
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from fsdp_jobs.cli.main import VERBS
from fsdp_jobs.config.arguments import overrides_in, search_path
from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.groups import groups
from fsdp_jobs.config.habits import program_as_overrides
from fsdp_jobs.config.hydra import compose_jobs
from fsdp_jobs.sweeps.verbs import _ACTIONS
from fsdp_jobs.tools.rehearse import FAULTS
from tests.jobs import ROOT
from tests.pages import PAGES, Command, commands_of, inline_commands

PARSER_OF = runpy.run_path(str(ROOT / "docs" / "keys.py"))["parser_of"]
COMPOSING = ("submit", "plan", "doctor", "rehearse", "resume", "init")
BLOCKS = [command for page in PAGES for command in commands_of(page)]


def is_own(words: Sequence[str]) -> bool:
    return words[0] == "fsdp-jobs" or list(words[:3]) == ["python", "-m", "fsdp_jobs"]


def arguments(words: Sequence[str]) -> list[str]:
    """What follows the name of the command, up to where its output goes; dots stand for what a reader adds."""
    first = 1 if words[0] == "fsdp-jobs" else 3
    return [w for w in itertools.takewhile(lambda word: word not in (">", "|"), words[first:]) if w != "..."]


def overrides_of(words: Sequence[str]) -> list[str] | None:
    """The overrides with which a command composes a job, None if it composes none.

    Raises:
        AssertionError: there is no such verb or action.
        BadInput: there is no such flag.
    """
    args = arguments(words)
    if args[:1] == ["help"]:
        assert args[1] in (*VERBS, *groups(), "VERB", "GROUP"), "no such verb or group"
        return None
    verb = args.pop(0) if args and args[0] in VERBS else "submit"
    assert verb != "submit" or not args or not args[0].isidentifier(), "no such verb"
    args = program_as_overrides(args) if verb in ("submit", "plan") else args
    if "--help" in args:
        return None
    is_sweep = "--multirun" in args
    if "--cfg" in args:
        del args[args.index("--cfg") : args.index("--cfg") + 2]
    flags, rest = PARSER_OF(verb).parse_known_args([a for a in args if a not in ("--multirun", "--info")])
    rest = overrides_in(rest)  # `plan --config-dir` is no flag of its parser
    if verb == "rehearse":
        assert flags.fault in (*FAULTS, "FAULT"), "no such fault"
    if verb == "sweep":
        assert flags.action in (*_ACTIONS, "ACTION"), "no such action"
    if verb not in COMPOSING:
        assert all(word.startswith(("runs_dir=", "sweep.dir=")) for word in rest), "not an argument"
        return None
    folder = getattr(flags, "config_dir", None)
    here = [search_path(folder)] if folder else []
    return here + [one for override in rest for one in (first_value(override) if is_sweep else [override])]


def first_value(override: str) -> Iterator[str]:
    """The override with the first of the values that a sweep takes; none if a sweeper chooses them."""
    parsed = OverridesParser.create().parse_override(override)
    if override.startswith("hydra"):
        return
    if not parsed.is_sweep_override():
        yield override
    elif parsed.is_choice_sweep():
        yield f"{parsed.get_key_element()}={next(iter(parsed.sweep_string_iterator()))}"


@pytest.fixture
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files whose text pages show: blocks of YAML that begin with `# folder/name.yaml`."""
    for page in PAGES:
        for name, text in re.findall(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    monkeypatch.chdir(tmp_path)


def test_every_command_of_ours_has_a_verb_flags_and_overrides_that_compose(users_folder: None) -> None:
    found = [c for c in BLOCKS if is_own(c.words)] + [c for page in PAGES for c in inline_commands(page)]
    assert len(found) > 100
    wrong, composing = [], []
    for command in found:
        for words in parts(command):
            speaks_of_a_verb = len(words) == 2 + (words[1:2] == ["sweep"]) and words[1] in VERBS
            if speaks_of_a_verb or not is_own(words):
                continue
            try:
                overrides = overrides_of(words)
            except (AssertionError, BadInput, SystemExit) as e:
                wrong.append(f"{command}\n    {e}")
                continue
            if overrides is not None:
                composing.append((command, overrides))
    for _, some in itertools.groupby(composing, lambda job: [o for o in job[1] if o.startswith("hydra.searchpath=")]):
        jobs = list(some)
        made = compose_jobs([overrides for _, overrides in jobs])
        for (command, _), composed in zip(jobs, made, strict=True):
            left_out = "..." in command.words and "has no value" in str(composed)
            if isinstance(composed, BadInput) and not left_out:
                wrong.append(f"{command}\n    {composed}")
    assert not wrong, "\n".join(wrong)


def parts(command: Command) -> list[list[str]]:
    """The words of each of the commands that `&&` and `|` join, without the files that they write to."""
    found: list[list[str]] = [[]]
    for before, word in itertools.pairwise(["", *command.words]):
        if word in ("&&", "|"):
            found.append([])
        elif ">" not in (word, before):
            found[-1].append(word)
    return found


def is_file(words: Sequence[str]) -> bool:
    return (ROOT / words[0]).is_file()


def is_of_tests(words: Sequence[str]) -> bool:
    """Whether the files exist, and have tests of the name that follows -k."""
    places = [ROOT / word for word in words if word.startswith("tests")]
    files = [file for place in places for file in (place.rglob("test_*.py") if place.is_dir() else [place])]
    name = words[words.index("-k") + 1] if "-k" in words else ""
    return all(place.exists() for place in places) and any(name in file.read_text() for file in files)


def is_python(words: Sequence[str]) -> bool:
    if words[0] == "-m" and words[1] == "pytest":
        return is_of_tests(words[2:])
    return importlib.util.find_spec(words[1]) is not None if words[0] == "-m" else is_file(words)


def is_installed(words: Sequence[str]) -> bool:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [e for named in re.findall(r"(?:fsdp_jobs|\.)\[(.*?)\]", " ".join(words)) for e in named.split(",")]
    return words[0] == "install" and all(e in project["optional-dependencies"] for e in extras)


def is_target(words: Sequence[str]) -> bool:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return all(word in targets for word in words if "=" not in word)


def is_of_docker(words: Sequence[str]) -> bool:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    if words[0] != "compose":
        files = [words[i + 1] for i, word in enumerate(words) if word in ("-f", "--file")]
        known = ("build", "push", "run", "kill", "stop", "start", "pause", "unpause", "rm", "network")
        return words[0] in known and all((ROOT / f).is_file() or (ROOT / "deploy" / f).is_file() for f in files)
    scaled = [word.partition("=")[0] for before, word in itertools.pairwise(words) if before == "--scale"]
    named = [words[words.index("exec") + 1]] if "exec" in words else []
    profiles = [word for before, word in itertools.pairwise(words) if before == "--profile"]
    known = {p for service in compose["services"].values() for p in service.get("profiles", [])}
    return set(scaled + named) <= set(compose["services"]) and set(profiles) <= known


def is_of_kubectl(words: Sequence[str]) -> bool:
    return all((ROOT / word).exists() for word in words if word.startswith("deploy/"))


# How the first word of a command that is not ours is checked. What no test can know is taken as it is.
CHECKS: dict[str, Callable[[Sequence[str]], bool]] = {
    "python": is_python,
    ".venv/bin/python": is_python,
    "pytest": is_of_tests,
    "pip": is_installed,
    "make": is_target,
    "docker": is_of_docker,
    "kubectl": is_of_kubectl,
    "cp": is_file,
    "cd": lambda words: (ROOT / words[0]).is_dir(),
    ".": lambda words: words == [".venv/bin/activate"],
    "export": lambda words: "=" in words[0],
    "git": lambda words: words[0] == "tag",
    "squeue": lambda words: True,
}


def test_every_other_command_names_what_exists() -> None:
    wrong = []
    for command in BLOCKS:
        for words in parts(command):
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if not is_own(words) and not CHECKS.get(words[0], lambda _: False)(words[1:]):
                wrong.append(str(command))
    assert not wrong, "\n".join(wrong)
