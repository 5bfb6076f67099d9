"""Convert a file of `accelerate config`: each of its keys becomes an override, a note or a problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from fsdp_jobs.config.arguments import Parser
from fsdp_jobs.config.errors import BadInput, Problem, nearest
from fsdp_jobs.config.schema import STRATEGIES
from fsdp_jobs.config.terminal import complain
from fsdp_jobs.run.files import write_atomic


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "1")


def _converted(value: Any, rule: dict[Any, Any]) -> Any:
    """Return a key's value, converted by its rule; None if there is none."""
    match rule.get("is"):
        case "switch":
            return rule.get(_is_true(value), _is_true(value))
        case "names" if value and isinstance(value, str):
            return [name.strip() for name in value.split(",")]
    return value or None


_GROUPS = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_", "dynamo_config": "dynamo_"}
_RULES: dict[str, dict[Any, Any]] = yaml.safe_load(Path(__file__).with_name("accelerate.yaml").read_text())
KNOWN = _RULES.keys()


@dataclass
class Imported:
    """The result of converting a file."""

    values: dict[str, Any] = field(default_factory=dict)  # our key -> its value
    notes: dict[str, str] = field(default_factory=dict)  # Accelerate's key -> why it sets nothing

    def overrides(self) -> list[str]:
        return [f"{key}={_as_override(value)}" for key, value in self.values.items()]

    def experiment(self, source: str) -> str:
        """Return a file for the group `experiment`; `source` is the name of Accelerate's file."""
        tree = OmegaConf.create()
        for key, value in self.values.items():
            OmegaConf.update(tree, key, value)
        comments = "".join(f"# {key}: {note}\n" for key, note in self.notes.items())
        return (
            f"# @package _global_\n# Converted from {source} of accelerate config.\n{comments}{OmegaConf.to_yaml(tree)}"
        )


def read(path: Path) -> Imported:
    """Convert a file.

    Raises:
        BadInput: it cannot be read, or has keys that are not available here; names all of them.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeError, yaml.YAMLError) as e:
        what = e.strerror if isinstance(e, OSError) else str(e).splitlines()[0]
        raise BadInput.at(str(path), str(what), "a file that accelerate config wrote") from e
    if not isinstance(content, dict):
        raise BadInput.at(str(path), "is not a configuration of Accelerate")
    if odd := [key for key in _GROUPS if not isinstance(content.get(key) or {}, dict)]:
        raise BadInput.at(str(path), f"{odd[0]} is not a group of keys")
    flat, result = {str(key): value for key, value in _flat(content)}, Imported()
    problems = list(_read_numbers(flat))
    problems += [problem for key, value in flat.items() for problem in _convert(key, value, result)]
    problems += _convert_ranks(flat, result)
    if str(flat.get("distributed_type", "FSDP")).upper() == "FSDP":
        replicas, group = (flat.get(f"parallelism_config_dp_{kind}_size") or 1 for kind in ("replicate", "shard"))
        convert = _convert_fsdp1 if (flat.get("fsdp_version") or 1) == 1 else _convert_fsdp2
        problems += convert(flat, replicas, group, result)
    if problems:
        raise BadInput(problems)
    return result


def _flat(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of the file and of its groups; keys in a group may lack its prefix."""
    for key, value in content.items():
        if key in _GROUPS:
            for name, inner in (value or {}).items():
                yield _GROUPS[key] + str(name).removeprefix(_GROUPS[key]), inner
        elif value or not str(key).endswith("_config"):
            yield key, value


def _read_numbers(flat: dict[str, Any]) -> Iterator[Problem]:
    """Make numbers of the keys that have one; remove those that are none, and yield them as problems."""
    for key, rule in _RULES.items():
        if rule.get("is") == "number" and flat.get(key):
            try:
                flat[key] = int(float(flat[key]))
            except (TypeError, ValueError, OverflowError):
                yield Problem(f"{key}: {flat.pop(key)}", "is not a number")


def _convert(key: str, value: Any, result: Imported) -> Iterator[Problem]:
    """Enter a key's values and note into `result`, by its rule; yield its problems."""
    if (rule := _RULES.get(key)) is None:
        yield Problem(f"{key}: {value}", "is not a known key of Accelerate", nearest(key, KNOWN) or "leave it out")
        return
    if "to" in rule:
        if (converted := _converted(value, rule)) is not None:
            result.values[rule["to"]] = converted
    elif choices := rule.get("values"):
        word = "no" if value is False else str(value).lower()  # YAML reads a bare no as false
        by_word = {choice.lower(): ours for choice, ours in choices.items()}
        if word not in by_word:
            yield Problem(f"{key}: {value}", "is not available here", f"one of {', '.join(choices)}")
        result.values |= by_word.get(word, {})
    elif why := rule.get("unavailable"):
        asked = _converted(value, rule)
        if asked and (rule.get("is") != "number" or asked > 1):
            yield Problem(f"{key}: {value}", why, rule["cure"])
    if note := rule.get("note") or rule.get("unavailable"):
        result.notes[key] = note


def _convert_ranks(flat: dict[str, Any], result: Imported) -> Iterator[Problem]:
    if not flat.get("num_processes"):
        return
    processes, machines = flat["num_processes"], flat.get("num_machines") or 1
    if processes < 0:
        result.notes["num_processes"] = "a node has as many ranks as GPUs"
    elif processes % machines:
        what = f"is not a multiple of num_machines: {machines}; all nodes have the same number of ranks here"
        yield Problem(f"num_processes: {processes}", what, str(-(-processes // machines) * machines))
    else:
        result.values["nproc_per_node"] = processes // machines


def _convert_fsdp1(flat: dict[str, Any], replicas: int, group: int, result: Imported) -> Iterator[Problem]:
    if replicas * group > 1:
        yield Problem(f"parallelism_config: {replicas} x {group}", "is for fsdp_version: 2", "fsdp_version: 2")
        return
    given = [flat[key] for key in ("fsdp_reshard_after_forward", "fsdp_sharding_strategy") if flat.get(key) is not None]
    named = given[0] if given else STRATEGIES[0]
    by_number = {str(number): name for number, name in enumerate(STRATEGIES, 1)}  # as FSDP1 numbers them
    strategy = by_number.get(str(named), str(named).lower())
    if strategy not in STRATEGIES:
        what = "is not a sharding strategy"
        yield Problem(f"fsdp_sharding_strategy: {named}", what, f"one of {', '.join(STRATEGIES)}")
        return
    result.values["fsdp.strategy"] = strategy
    if strategy.startswith("hybrid") and "nproc_per_node" in result.values:
        result.values["fsdp.shard_group"] = result.values["nproc_per_node"]  # FSDP1 shards within nodes


def _convert_fsdp2(flat: dict[str, Any], replicas: int, group: int, result: Imported) -> Iterator[Problem]:
    reshard = flat.get("fsdp_reshard_after_forward")
    reshards = reshard is None or _is_true(reshard)
    if replicas > 1 and group > 1:
        strategy = "hybrid_shard" if reshards else "hybrid_shard_zero2"
        result.values |= {"fsdp.strategy": strategy, "fsdp.shard_group": group}
        ranks = flat.get("num_processes") or 0
        if 0 < ranks != replicas * group:
            yield Problem(f"num_processes: {ranks}", f"is not {replicas} replicas x {group}", str(replicas * group))
    elif replicas > 1:
        result.values["fsdp.strategy"] = "no_shard"
    else:
        result.values["fsdp.strategy"] = "full_shard" if reshards else "shard_grad_op"
    if "fsdp_sharding_strategy" in flat:
        result.notes["fsdp_sharding_strategy"] = "for fsdp_version: 1; here fsdp_reshard_after_forward decides"


def _as_override(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'[{','.join(value)}]'" if isinstance(value, list) else str(value)


def main(args: list[str]) -> int:
    """Run the verb `import-accelerate`."""
    parser = Parser("import-accelerate")
    parser.add_argument("file", type=Path, help="that accelerate config wrote")
    parser.add_argument("--experiment", metavar="NAME", help="as a file for the group experiment")
    parser.add_argument("--config-dir", metavar="DIR", type=Path, help="where to write that file")
    flags = parser.parse_args(args)
    imported = read(flags.file)
    text = imported.experiment(flags.file.name) if flags.experiment else " ".join(imported.overrides()) + "\n"
    if flags.experiment and flags.config_dir is not None:
        file = flags.config_dir / "experiment" / f"{flags.experiment}.yaml"
        if file.exists():
            raise BadInput.at(str(file), "is there already, and is not overwritten", "another --experiment")
        write_atomic(file, text)
        text = f"{file}\n"
    print(text, end="", flush=True)
    for key, note in imported.notes.items():
        complain(f"{key}: {note}", "dim")
    return 0
