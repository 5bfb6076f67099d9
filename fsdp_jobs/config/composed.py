"""Keep what Hydra has composed for a choice of groups, for as long as nothing changes that it depends on. No torch.

Composing takes half of the time of a short command. What is kept is found by a digest of the choice, every file of
`conf/`, the schemas, Hydra and Python: what has changed is composed anew, and nothing is ever compared by its age.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from fsdp_jobs.config.groups import CONF_DIR

_MOST = 100  # choices that are kept
_RESOLVER = re.compile(rb"\$\{[^}]*:")  # ${oc.env:HOME}: what it gives is in none of the files


def composed(choices: Sequence[str], compose: Callable[[], bytes]) -> bytes:
    """Return what `compose` makes of a choice of groups, or has made of it before.

    Nothing is kept of choices with settings of Hydra's own, which may name folders of the user's.
    """
    files = sorted([*CONF_DIR.rglob("*.yaml"), *Path(__file__).parent.glob("*.py")])
    contents = {str(file): file.read_bytes() for file in files}
    is_pure = not any(_RESOLVER.search(text) for name, text in contents.items() if name.endswith(".yaml"))
    is_kept = is_pure and not any(c.lstrip("+~").startswith("hydra") for c in choices)
    folder = _folder() if is_kept else None
    if folder is None:
        return compose()
    libraries = [version(name) for name in ("hydra-core", "omegaconf", "PyYAML")]
    digest = hashlib.sha256(repr((tuple(choices), contents, libraries, sys.version)).encode()).hexdigest()
    kept = folder / digest
    with suppress(OSError):
        made = kept.read_bytes()
        if hashlib.sha256(made[32:]).digest() == made[:32]:  # whole
            return made[32:]
    made = compose()
    with suppress(OSError):
        temporary = folder / f".{digest}.{os.getpid()}"
        temporary.write_bytes(hashlib.sha256(made).digest() + made)
        temporary.replace(kept)
        for old in sorted(folder.glob("[!.]*"), key=lambda file: file.stat().st_mtime)[:-_MOST]:
            old.unlink(missing_ok=True)
    return made


def _folder() -> Path | None:
    """Return the folder of what is kept; None where there is none that only this user can write to."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "fsdp_jobs", "composed")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return None
    return folder if status.st_uid == os.getuid() and not status.st_mode & 0o022 else None
