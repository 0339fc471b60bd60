import json

import pytest

from vfl.attacks import ATTACKS
from vfl.attacks.active import ADVERSARIES
from vfl.compression import CODECS
from vfl.config.grid import PACKS
from vfl.datasets import SOURCES
from vfl.datasets.alignment.ids import ID_RULES
from vfl.datasets.alignment.protocols import PROTOCOLS
from vfl.datasets.augment import AUGMENTATIONS
from vfl.defenses import DEFENSES
from vfl.models import BOTTOMS, MERGERS, TOPS
from vfl.models.losses import LOSSES
from vfl.models.optimizers import OPTIMIZERS, SCHEDULES
from vfl.privacy.accountants import ACCOUNTANTS
from vfl.session.secure_mode import SECURE

FAMILIES = {
    "codecs": CODECS,
    "defenses": DEFENSES,
    "secure": SECURE,
    "attacks": ATTACKS,
    "adversaries": ADVERSARIES,
    "bottoms": BOTTOMS,
    "mergers": MERGERS,
    "tops": TOPS,
    "losses": LOSSES,
    "optimizers": OPTIMIZERS,
    "schedules": SCHEDULES,
    "alignments": PROTOCOLS,
    "id_rules": ID_RULES,
    "accountants": ACCOUNTANTS,
    "sources": SOURCES,
    "augmentations": AUGMENTATIONS,
}


NAMES = {family: registry.names() for family, registry in FAMILIES.items()} | {"packs": list(PACKS)}


def test_every_alias_is_of_a_member(vfl):
    shown = vfl("list").out
    for registry in FAMILIES.values():
        for alias, name in registry.aliases.items():
            assert alias not in registry.names()
            assert registry.member(alias) is registry.member(name)
            assert f"Also: {alias}." in shown


def test_every_registered_name_is_listed_with_its_options(vfl):
    done = vfl("list", "--json")
    rows = json.loads(done.out)
    assert done.code == 0
    assert done.err == ""
    found = {(row["family"], row["name"]) for row in rows}
    assert found == {(family, name) for family, known in NAMES.items() for name in known}
    specs = {row["name"]: row["spec"] for row in rows if row["family"] == "codecs"}
    assert specs["none"] == "none"
    assert specs["randtopk"].startswith("randtopk:k,")
    assert {"alpha=0.1", "law=sequential"} <= set(specs["randtopk"].split(","))
    assert all(row["summary"].endswith(".") for row in rows)


@pytest.mark.parametrize("family", ["codecs", "packs"])
def test_one_family(vfl, family):
    rows = json.loads(vfl("list", family, "--json").out)
    assert [row["name"] for row in rows] == NAMES[family]
    shown = vfl("list", family).out
    assert all(row["spec"] in shown and row["summary"] in shown for row in rows)


def test_a_family_that_does_not_exist(refused):
    done = refused("list", "codec")
    assert "codecs" in done.err
