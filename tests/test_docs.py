"""The pages under docs/ say what the code says."""

from __future__ import annotations

import re
import runpy
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

from omegaconf import OmegaConf

from fsdp_jobs.config.clusters import ClusterConfig, SlurmClusterConfig
from fsdp_jobs.config.groups import groups
from fsdp_jobs.config.hydra import compose_job, keys_of
from fsdp_jobs.config.schema import CustomModelConfig, HfConfig

ROOT = Path(__file__).parent.parent
GROUPS = (
    "cluster",
    "hardware",
    "model",
    "fsdp",
    "data",
    "optim",
    "checkpoint",
    "checkpoint.memory",
    "integrity",
    "elastic",
    "sweep",
    "tracking",
    "notify",
    "program",
)


def documented() -> dict[str, str]:
    """Key -> default, from the tables of docs/reference/configuration.md."""
    page = (ROOT / "docs" / "reference/configuration.md").read_text()
    return dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", page, re.MULTILINE))


def test_every_key_is_documented_with_its_default() -> None:
    config = OmegaConf.structured(compose_job([]))
    models = [k for kind in (CustomModelConfig, HfConfig) for k in keys_of(OmegaConf.structured(kind))]
    known = {k for k in keys_of(config) if k not in GROUPS} | {f"model.{k}" for k in models}
    shown = documented()
    assert set(shown) == known
    for key, default in shown.items():
        value = OmegaConf.select(config, key)
        if key in ("model._target_", "model.kwargs", "model.name_or_path", "model.pretrained"):
            continue
        plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        text = "null" if plain is None else str(plain).lower() if isinstance(plain, bool) else str(plain)
        assert default == text.replace("'", ""), key


def test_what_pages_take_from_the_code_is_what_the_code_says() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "keys.py"))
    for file in made["PAGES"]:
        page = file.read_text()
        assert page == made["with_tables"](page), f"{file.name}: make docs-keys"
        assert re.search(r"^\| `", page, re.MULTILINE)


def test_every_option_is_in_the_table_of_groups() -> None:
    page = (ROOT / "docs" / "reference/configuration.md").read_text()
    for group, options in groups().items():
        (row,) = re.findall(rf"^\| \[?`{group}`(?:\]\(#[\w-]+\))? \| (.*?) \|", page, re.MULTILINE)
        assert sorted(row.split(", ")) == options, group


def test_links_between_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target, _, anchor in re.findall(r"\]\(([^)#:]*)(#?)([^):]*)\)", page.read_text()):
            file = (page.parent / target) if target else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
                assert anchor in slugs, f"{page.name}: {target}#{anchor}"


def test_pictures_are_whole_and_load_nothing() -> None:
    pictures = list((ROOT / "docs" / "img").glob("*.svg"))
    assert len(pictures) > 4
    for picture in pictures:
        for element in ElementTree.parse(picture).iter():
            assert not [v for v in element.attrib.values() if "http" in v], picture.name


def test_every_key_of_slurm_is_on_its_page() -> None:
    page = (ROOT / "docs" / "launchers/slurm.md").read_text()
    rows = [row.split(" | ") for row in re.findall(r"^\| (`cluster\..*)$", page, re.MULTILINE)]
    shown = {
        key.removeprefix("cluster."): default for keys, default, _ in rows for key in re.findall(r"`([\w.]+)`", keys)
    }
    own = {f.name: f for f in fields(SlurmClusterConfig) if f.name not in {g.name for g in fields(ClusterConfig)}}
    assert set(shown) == set(own)
    for key, default in shown.items():
        value = getattr(SlurmClusterConfig(), key)
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        assert default == text.removesuffix(".0"), key


def test_architecture_lists_every_package() -> None:
    page = (ROOT / "docs" / "how-it-works/architecture.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \| ", page.split("## Packages")[1].split("## ")[0], re.MULTILINE)
    shown = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    packages = {file.parent.name for file in (ROOT / "fsdp_jobs").glob("*/__init__.py")}
    assert shown == packages | {"notebook"}


def test_architecture_names_only_modules_that_exist() -> None:
    page = (ROOT / "docs" / "how-it-works/architecture.md").read_text()
    for path in re.findall(r"[\w/.-]+\.py\b", page):
        assert any((top / path).is_file() for top in (ROOT, ROOT / "fsdp_jobs")), path
    for name in re.findall(r"\bfsdp_jobs(?:\.\w+)+", page):
        place = ROOT.joinpath(*name.split("."))
        assert place.is_dir() or place.with_suffix(".py").is_file(), name
