"""Hydra composes each choice of groups once, for all who import this: `conf/` stays as it is while tests run.

Ranks are forked from a process that has imported it.
"""

from __future__ import annotations

from hydra import compose
from omegaconf import DictConfig

from fsdp_jobs.config import hydra

_known: dict[tuple[str, ...], DictConfig] = {}


def _compose(name: str, overrides: list[str]) -> DictConfig:
    if any(o.startswith("hydra") for o in overrides):  # a folder of groups that the test made
        return compose(name, overrides=overrides)
    choices = tuple(overrides)
    if choices not in _known:
        _known[choices] = compose(name, overrides=overrides)
    return _known[choices]


hydra.hydra_compose = _compose
hydra.compose_jobs([["data=synthetic"], ["data=synthetic", "model=custom"]])  # what most ranks choose
