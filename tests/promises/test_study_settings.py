"""Every setting of a study, set to another value: it changes the results, or is refused."""

import json
import re
from functools import cache
from itertools import count

import pytest
from settings_walked import SettingsWalk

from vfl.config import CompareSettings, GridSettings, ValueSettings
from vfl.core.seeds import use_one_thread
from vfl.experiments import notebook, value

EXPERIMENT = """\
seed = 1
[data]
source = "digits"
rows = 240
validation = 0.2
[parties.bank]
width = 4
bottom = "mlp:hidden=8"
[parties.shop]
width = 4
bottom = "mlp:hidden=8"
[label]
top = "mlp:hidden=8"
[train]
epochs = 2
batch_size = 32
learning_rate = 0.01
"""
#: Left out of a comparison: how long anything took, and what names the settings or this study.
TIMES = re.compile("second|_ms$|^(name|created|command|environments?|made_of|config_sha256)$")
#: What each case below starts from.
BASES = {
    "compare": ("compare.codecs=['none', 'topk:k=2']", "compare.seeds=[0]"),
    "grid": (
        "grid.defenses=['nopeek']",
        "grid.attacks=['kmeans:starts=1', 'logistic']",
        "grid.baselines=['random']",
        "grid.leaks=[1]",
        "grid.draws=1",
        "grid.seeds=[0]",
        "grid.pictures=0",
    ),
    "value": ("value.seeds=[0]",),
}
INVERSION = ("grid.attacks=['inversion:steps=4']", "grid.defenses=[]")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What a study leaves: its tables, its scores, its forecasts, and which files it wrote."""
    use_one_thread()
    folder = tmp_path_factory.mktemp("studies")
    (folder / "digits.toml").write_text(EXPERIMENT)
    numbers = count()

    @cache
    def of(kind, *settings):
        out = folder / f"study-{next(numbers)}"
        study = getattr(notebook, kind)
        found = study(folder / "digits.toml", *BASES[kind], *settings, out=out, progress=False)
        assert not found.failed, found.failed[0].failure
        files = sorted(str(one.relative_to(out)) for one in out.rglob("*") if one.is_file())
        page = found.page.read_text()
        told = [untimed(found.content), files, page.count("<svg"), page.count("<img")]
        return re.sub("-[0-9a-f]{12}", "", json.dumps(told, sort_keys=True))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(value, "_TREES", 20)  # enough for a table of so few rows
        yield of


def untimed(content):
    """A study's results without times, and without digests of its settings."""
    if isinstance(content, dict):
        return {name: untimed(one) for name, one in content.items() if not TIMES.search(name)}
    if not isinstance(content, list | tuple):
        return content
    kept = [one for one in content if not (isinstance(one, dict) and is_time(one))]
    return [untimed(one) for one in kept]


def is_time(record):
    """Whether a row of results measures how long something took."""
    return bool(TIMES.search(str(record.get("measure", ""))))


class TestStudySettings(SettingsWalk):
    models = (
        ("compare.", CompareSettings),
        ("grid.", GridSettings),
        ("value.", ValueSettings),
    )
    bases = BASES
    #: Levels wait for a codec with a "?".
    cases = (
        ("compare.codecs", "['none', 'topk:k=3']"),
        ("compare.seeds", "[1]"),
        ("compare.folds", "3", "compare.seeds=[0]"),
        (
            "compare.levels",
            "[60.0]",
            "compare.codecs=['none', 'topk:k=?']",
            "compare.levels=[80.0]",
        ),
        ("compare.accuracy", "[0.05]"),
        ("compare.measure", "balanced_accuracy"),
        ("compare.baseline", "topk:k=2"),
        ("compare.variants", "{fast=['train.learning_rate=0.05']}"),
        ("grid.defenses", "['layer_norm']"),
        ("grid.codecs", "['topk:k=2']"),
        ("grid.models", "['trees:max_depth=2']"),
        ("grid.adversaries", "['replacement']"),
        ("grid.known", "3", "grid.adversaries=['replacement']"),
        ("grid.known", "3"),
        ("grid.attacks", "['kmeans']"),
        ("grid.baselines", "['raw']"),
        ("grid.baseline_attacks", "['kmeans']"),
        ("grid.leaks", "[2]"),
        ("grid.draws", "2"),
        ("grid.seeds", "[1]"),
        ("grid.party", "shop"),
        ("grid.trained_by", "owner"),
        ("grid.leaks_from", "validation"),
        ("grid.unlabelled", "validation"),
        ("grid.measure", "balanced_accuracy"),
        ("grid.margin", "20.0", "grid.seeds=[0, 1, 2]", "grid.attacks=['kmeans:starts=1']"),
        ("grid.known_columns", "5"),
        ("grid.known_columns", "5", *INVERSION),
        ("grid.attribute", "2"),
        ("grid.attribute", "2", "grid.attacks=['attribute']", "grid.defenses=[]"),
        ("grid.pictures", "20"),
        ("grid.reconstructions", "false"),
        ("grid.reconstructions", "false", *INVERSION),
        ("grid.record", "['training']"),
        ("value.codecs", "['topk:k=2']"),
        ("value.defenses", "['nopeek']"),
        ("value.seeds", "[1]"),
        ("value.measure", "accuracy"),
    )
