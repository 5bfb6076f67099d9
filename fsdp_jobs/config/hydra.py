"""From overrides to a JobConfig: Hydra composes, and every override that cannot be is named at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fsdp_jobs.config.errors import BadInput, Problem, nearest
from fsdp_jobs.config.schema import SCHEMAS, JobConfig

_OPEN = (  # mappings whose keys are the user's
    "model.kwargs",
    "cluster.annotations",
    "cluster.env",
    "cluster.labels",
    "cluster.node_selector",
    "cluster.pod_patch",
    "cluster.resources",
    "cluster.secret_env",
)

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"

# Hydra takes plugins from the package hydra_plugins alone. Under these names `launchers/sweep.py` gives it ours.
PLUGINS = {"launcher": "hydra_plugins.fsdp_jobs.SweepLauncher", "sweeper": "hydra_plugins.fsdp_jobs.GridSweeper"}


def register_schemas() -> None:
    """Tell Hydra the dataclasses that the files in `conf/` build on, and the names of our plugins."""
    store = ConfigStore.instance()
    for group, name, node in SCHEMAS:
        store.store(group=group, name=name, node=node)
    store.store(group="hydra/launcher", name="fsdp_jobs", node={"_target_": PLUGINS["launcher"]})
    grid = {"_target_": PLUGINS["sweeper"], "max_batch_size": None, "params": None}
    store.store(group="hydra/sweeper", name="fsdp_jobs", node=grid)


@contextmanager
def hydra_here() -> Iterator[None]:
    """Hydra, set up for `conf/`."""
    register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):
        yield


def groups() -> dict[str, list[str]]:
    """Every group of `conf/` with its options, schemas left out."""
    return {
        d.name: sorted(f.stem for f in d.glob("*.yaml"))
        for d in sorted(CONF_DIR.iterdir())
        if d.is_dir() and any(d.glob("*.yaml"))
    }


def keys_of(config: DictConfig, prefix: str = "") -> list[str]:
    """All dotted keys of a configuration, inner nodes included: `optim`, `optim.lr`, ..."""
    found = []
    for key in map(str, config):
        dotted = f"{prefix}{key}"
        found.append(dotted)
        child = config._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            found += keys_of(child, f"{dotted}.")
    return found


def merge_overrides(first: Sequence[str], then: Sequence[str]) -> list[str]:
    """Both lists, where a key of the second replaces the same key of the first."""
    replaced = {o.partition("=")[0].lstrip("+~") for o in then}
    return [o for o in first if o.partition("=")[0].lstrip("+~") not in replaced] + list(then)


def as_meant(overrides: Sequence[str]) -> list[str]:
    """Overrides as Hydra has to be told them.

    `script_args` may stand as in a shell, unless Hydra's quotes or a choice for a sweep are in it; and with a program
    of the user's no model is the default.
    """
    told = [_quoted(o) if o.startswith("script_args=") else o for o in overrides]
    has_program = any(o.startswith(("script=", "module=")) and not o.endswith("=null") for o in told)
    has_model = any(o.startswith("model=") for o in told)
    return ["model=none", *told] if has_program and not has_model else told


def _quoted(override: str) -> str:
    """What Hydra reads as one text, or as a choice, stays; of anything else a quoted text is made."""
    key, _, value = override.partition("=")
    try:
        parsed = OverridesParser.create().parse_override(override)
        if parsed.is_sweep_override():
            is_hydras = value.startswith(("choice(", "range(", "interval("))
        else:
            is_hydras = isinstance(parsed.value(), str)
    except HydraException:
        is_hydras = False
    if is_hydras:
        return override
    escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
    return f"{key}='{escaped}'"


def compose_job(overrides: Sequence[str], config_dir: str | None = None) -> JobConfig:
    """The configuration that these Hydra overrides make of `conf/`.

    Args:
        overrides: `key=value`, `group=option`, as on the command line.
        config_dir: a further folder of the user's with groups of the same form.

    Raises:
        BadInput: every override that does not parse, names no key or group, or has a value of the
            wrong type; with the nearest key that exists.
    """
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise BadInput([Problem(f"--config-dir {config_dir}", "is not a folder")])
        overrides = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]", *overrides]
    overrides = as_meant(overrides)
    with hydra_here():
        if any(o.startswith(("+", "~")) for o in overrides):  # with these Hydra adds and removes keys unasked
            problems = _problems_of(list(overrides))
            if problems:
                raise BadInput(problems)
        try:
            # Hydra wants ++ before a key that no schema has.
            opened = [f"++{o}" if o.startswith(_OPEN) else o for o in overrides]
            config = hydra_compose("config", overrides=opened)
            missing = [k for k in OmegaConf.missing_keys(config) if not k.startswith("hydra.")]
            if not missing:
                return cast(JobConfig, OmegaConf.to_object(config))
        except Exception as e:  # Hydra stops at the first problem, with whatever exception: look for all of them
            problems = _problems_of(list(overrides))
            if not problems and not isinstance(e, (HydraException, OmegaConfBaseException)):
                raise
            raise BadInput(problems or [Problem("configuration", _first_lines(e))]) from e
    raise BadInput(Problem(k, "has no value", f"write {k}=...") for k in sorted(missing))


def compose_many(jobs: Sequence[Sequence[str]]) -> list[JobConfig | BadInput]:
    """What `compose_job` makes of each job, where jobs differ in few overrides: Hydra composes once a choice of groups.

    Returns:
        A configuration, or what is wrong with the job, for each.
    """
    made: list[JobConfig | BadInput] = []
    bases: dict[tuple[str, ...], DictConfig] = {}
    with hydra_here():
        reader = _Reader(_searched(jobs[0]) if jobs else [])
    for job in map(as_meant, jobs):
        adds_or_removes = any(o.startswith(("+", "~")) for o in job)
        try:
            made.append(compose_job(job) if adds_or_removes else _compose_on(bases, reader, job))
        except BadInput as e:
            made.append(e)
    return made


def _compose_on(bases: dict[tuple[str, ...], DictConfig], reader: _Reader, overrides: Sequence[str]) -> JobConfig:
    """A job's values over what its choices make, which is kept in `bases` for the next one."""
    told = reader.sort(overrides)
    choices = tuple(told.choices)
    if choices not in bases:
        try:
            with hydra_here():
                bases[choices] = hydra_compose("config", overrides=list(choices))
        except (HydraException, OmegaConfBaseException) as e:
            raise BadInput([*told.problems, Problem("configuration", _first_lines(e))]) from e
    config, keys = copy.deepcopy(bases[choices]), keys_of(bases[choices])
    problems = list(told.problems)
    for text, override in told.values:
        problems += _value_problem(text, override, config, keys, reader.known_groups)
    missing = [] if problems else OmegaConf.missing_keys(config)
    problems += [Problem(k, "has no value", f"write {k}=...") for k in sorted(missing)]
    if problems:
        raise BadInput(problems)
    return cast(JobConfig, OmegaConf.to_object(config))


def check_sweep(overrides: Sequence[str]) -> None:
    """Raises: BadInput for overrides of a --multirun that cannot be, those with several values aside."""
    with hydra_here():
        problems = _problems_of(list(overrides), sweep=True)
        if problems:
            raise BadInput(problems)


@dataclass
class _Sorted:
    """Overrides, told apart."""

    choices: list[str]  # group=option and Hydra's own settings: they decide which keys there are
    values: list[tuple[str, Override]]
    problems: list[Problem]


class _Reader:
    """Tells overrides apart, within `hydra_here`."""

    def __init__(self, search: Sequence[str]):
        """`search`: the overrides hydra.searchpath=..., which bring groups of the user's."""
        self.search, self.options = list(search), groups()
        self.known_groups = sorted(set(self.options) | _user_groups(self.search))
        self._parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        self._parsed: dict[str, Override] = {}

    def sort(self, overrides: Sequence[str], sweep: bool = False) -> _Sorted:
        found = _Sorted([], [], [])
        for text in overrides:
            try:
                override = self._parsed.get(text) or self._parser.parse_override(text)
            except HydraException:
                instead = "quote values with spaces or commas"
                found.problems.append(Problem(text, "is not of the form key=value", instead))
                continue
            self._parsed[text] = override
            key = override.key_or_group
            if override.is_sweep_override():
                if not sweep:
                    found.problems.append(Problem(text, "names several values", "add --multirun to run each of them"))
            elif key.startswith(("hydra.", "hydra/")):
                found.choices.append(text)
            elif key in self.known_groups:
                option = str(override.value())
                available = set(self.options.get(key, [])) | _user_options(self.search, key)
                if option in available or option == "None":
                    found.choices.append(text)
                else:
                    what = f"there is no {key} of that name; there are {', '.join(sorted(available))}"
                    found.problems.append(Problem(text, what, nearest(option, available)))
            else:
                found.values.append((text, override))
        return found


def _searched(overrides: Sequence[str]) -> list[str]:
    return [o for o in overrides if o.startswith("hydra.searchpath=")]


def _problems_of(overrides: list[str], sweep: bool = False) -> list[Problem]:
    reader = _Reader(_searched(overrides))
    told = reader.sort(overrides, sweep)
    try:
        base = hydra_compose("config", overrides=told.choices)
    except (HydraException, OmegaConfBaseException) as e:
        return [*told.problems, Problem("configuration", _first_lines(e))]
    keys = keys_of(base)
    problems = list(told.problems)
    for text, override in told.values:
        problems += _value_problem(text, override, base, keys, reader.known_groups)
    return problems


def _value_problem(
    text: str, override: Override, base: DictConfig, keys: list[str], known_groups: list[str]
) -> list[Problem]:
    key = override.key_or_group
    is_open = key.startswith(_OPEN)
    if key not in keys and not is_open:
        hint = nearest(key, keys + known_groups)
        return [Problem(text, "there is no such key", hint or "python -m fsdp_jobs --cfg job lists all keys")]
    try:
        OmegaConf.update(base, key, override.value(), merge=True, force_add=is_open)
    except OmegaConfBaseException as e:
        return [Problem(text, _first_lines(e))]
    return []


def _user_folders(search: list[str]) -> list[Path]:
    return [Path(p.strip("'\"[] ").removeprefix("file://")) for s in search for p in s.partition("=")[2].split(",")]


def _user_groups(search: list[str]) -> set[str]:
    return {d.name for folder in _user_folders(search) for d in folder.glob("*") if d.is_dir()}


def _user_options(search: list[str], group: str) -> set[str]:
    return {f.stem for folder in _user_folders(search) for f in (folder / group).glob("*.yaml")}


def _first_lines(error: Exception) -> str:
    """The part of an OmegaConf or Hydra message that speaks to the user."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(line for line in lines if not line.startswith(("full_key", "object_type", "reference_type")))
