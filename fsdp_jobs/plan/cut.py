"""Cutting a model into FSDP units by size, from the names and shapes of its parameters alone."""

from __future__ import annotations

import math

Shape = tuple[int, ...]
Params = tuple[tuple[str, Shape], ...]


def cut_by_size(params: Params, min_num_params: int) -> tuple[list[tuple[str, Params]], Params]:
    """The smallest modules with at least `min_num_params` parameters that no deeper unit holds; and the rest.

    Modules are read from the dotted names. Lists of modules, whose children are numbers, cannot be units;
    neither is the root. training/sharding.py cuts live modules in the same way.
    """
    units: list[tuple[str, Params]] = []

    def visit(path: str, inside: Params) -> Params:
        depth = len(path)
        own = tuple(p for p in inside if "." not in p[0][depth:])
        children: dict[str, list[tuple[str, Shape]]] = {}
        for name, shape in inside:
            child, dot, _ = name[depth:].partition(".")
            if dot:
                children.setdefault(child, []).append((name, shape))
        rest = own
        for child, theirs in children.items():
            rest += visit(f"{path}{child}.", tuple(theirs))
        is_list = bool(children) and all(c.isdigit() for c in children)
        if path and not is_list and sum(math.prod(s) for _, s in rest) >= min_num_params:
            units.append((path.rstrip("."), rest))
            return ()
        return rest

    return units, visit("", params)
