"""What a paper needs of results: a LaTeX table, a schema, versions, hardware and digests."""

import json
import re
import statistics
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

import vfl
from vfl.core.version import VERSION
from vfl.experiments.latex import escaped
from vfl.experiments.provenance import results_schema

ROOT = Path(__file__).parents[2]
LABELS = torch.arange(90) % 3
INPUTS = torch.eye(6)[LABELS] + 0.5 * torch.randn(90, 6, generator=torch.Generator().manual_seed(0))


def build(codec, defense, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    return vfl.split(net, "0", torch.zeros(2, 6), codec=codec, defense=defense, seed=seed)


def batches_of(rows):
    return list(zip(INPUTS.split(rows), LABELS.split(rows), strict=True))


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    folder, batches = tmp_path_factory.mktemp("u"), batches_of(15)
    quick = {"epochs": 2, "learning_rate": 0.02, "seeds": [0, 1], "progress": False}
    attacks = {"attacks": ["logistic"], "leaks": [2], "draws": 2, "baselines": ["raw"]}
    compared = ["none", "topk:k=2"]
    return {
        "codecs": vfl.compare(build, batches, codecs=compared, out=folder / "codecs", **quick),
        "attacks": vfl.grid(build, batches, out=folder / "attacks", **attacks, **quick),
    }


@pytest.fixture(scope="module")
def check():
    """A validator of the schema; the tests of one worker alone pay for importing jsonschema."""
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    validator.check_schema(results_schema())
    return validator(results_schema())


@pytest.mark.parametrize("kind", ["codecs", "attacks"])
def test_results_hold_to_their_schema(studies, check, kind):
    record = json.loads((studies[kind].path / "results.json").read_text())
    check.validate(record)
    assert record["kind"] == kind
    assert len(record["records"]) == len(studies[kind].table)
    assert record["environments"][0]["torch"] == metadata.version("torch")
    assert record["environments"][0]["processor_model"]
    trained = [one for one in record["cells"] if one["trained"]]
    assert {one["state"] for one in record["cells"]} == {"done"}
    assert len({one["weights_sha256"] for one in trained}) == len(trained)
    assert len({one["made_of"]["data"] for one in trained}) == 1
    assert all(one["made_of"]["built"] for one in trained)


def test_a_record_too_many_or_too_few_breaks_the_schema(studies, check):
    record = json.loads((studies["codecs"].path / "results.json").read_text())
    del record["records"][0]["guess"]
    assert not check.is_valid(record)
    assert not check.is_valid({key: one for key, one in record.items() if key != "environments"})


def test_a_table_for_a_paper(studies):
    text = studies["codecs"].to_latex(caption="Codecs & 50 %", label="tab:codecs")
    table = studies["codecs"].table
    for codec in ("none", "topk:k=2"):
        found = table[(table.codec == codec) & (table.measure == "accuracy")].value.tolist()
        mean, std = 100 * statistics.fmean(found), 100 * statistics.stdev(found)
        (line,) = [one for one in text.splitlines() if one.startswith(f"{codec} &")]
        assert rf"${mean:.1f} \pm {std:.1f}$" in line
        assert line.endswith(r" & 2 \\")
        assert "$33.3$" in line, "the guess"
    assert r"\caption{Codecs \& 50 \%}" in text
    assert r"\label{tab:codecs}" in text
    lines = [one for one in text.splitlines() if one.endswith(r"\\")]
    assert len({len(re.findall(r"(?<!\\)&", one)) for one in lines}) == 1
    assert text.count("{") == text.count("}")


def test_attacks_of_a_paper_stand_beside_guess_and_baseline(studies):
    text = studies["attacks"].to_latex(["accuracy"])
    (line,) = [one for one in text.splitlines() if one.startswith("none & logistic & 2 &")]
    cells = line.removesuffix(r" \\").split(" & ")
    table = studies["attacks"].table
    own = table[(table.subject == "logistic") & (table.measure == "accuracy")]
    by_seed = own.groupby("repeat")[["value", "guess", "no_model"]].mean()
    assert cells[4] == rf"${100 * by_seed.value.mean():.1f} \pm {100 * by_seed.value.std():.1f}$"
    assert cells[5] == f"${100 * by_seed.guess.mean():.1f}$"
    assert cells[6] == f"${100 * by_seed.no_model.mean():.1f}$"


def test_what_latex_reads_otherwise_is_escaped():
    assert escaped("a_b & 5 % {x} #1 $ ^ ~") == (
        r"a\_b \& 5 \% \{x\} \#1 \$ \textasciicircum{} \textasciitilde{}"
    )
    assert escaped("\\input{x}") == r"\textbackslash{}input\{x\}"


def test_the_citation_is_of_this_version():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(found)
    assert found["cff-version"] == "1.2.0"
    assert found["version"] == VERSION
    assert found["type"] == "software"
    assert all(set(one) <= {"name", "family-names", "given-names"} for one in found["authors"])
    assert f'license = "{found["license"]}"' in (ROOT / "pyproject.toml").read_text()
