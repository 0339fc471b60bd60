import json

import pytest
from pydantic import ValidationError

from vfl.config import Experiment
from vfl.core.errors import ConfigError, SpecError
from vfl.core.version import VERSION
from vfl.session import Terms
from vfl.session.terms import EXPLAIN


def leaves(content, path=()):
    """The paths of all values in nested tables."""
    if isinstance(content, dict):
        return [leaf for key in content for leaf in leaves(content[key], (*path, key))]
    return [path]


#: Another permitted value of each field that is neither number nor free text.
OTHER = {
    "mode": "predict",
    "merge": "sum",
    "optimizer": "sgd",
    "keep": "best",
    "measure": "accuracy",
    "precision": "bfloat16",
    "shuffle": "blocks",
    "alignment": "later",
    "missing_rows": "token",
    "warm_start": "january",
    "clip_by": "layer",
    "quantile": 0.5,
    "middle": {"party": "compute"},
    "dp": {"noise": 1.0},
    "epsilon": 3.0,
    "noise": 2.0,
    "sampling": "shuffled",
    "accountant": "pld",
    "unit": "client",
    "label_trains": False,
    "key": "a" * 64,
}


#: What goes with other settings alone.
RESTRICTED = {
    "branches", "unit", "serving", "beside", "explained", "block_rows", "window_blocks",
}  # fmt: skip


def another(name, value):
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, str):
        return value + "x"
    return value + 1 if isinstance(value, int) else value / 2 + 0.015625


def changed(content, path):
    content = json.loads(json.dumps(content))
    table = content
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = another(path[-1], table[path[-1]])
    return content


def _differ(terms, paths):
    content = terms.model_dump(mode="json")
    variants = [Terms.model_validate(changed(content, path)) for path in paths]
    digests = {variant.digest() for variant in variants} | {terms.digest()}
    return len(digests) == len(variants) + 1


@pytest.mark.parametrize("dp", [None, {"noise": 1.0}])
def test_any_field_changes_the_digest(terms, dp):
    content = terms.model_dump(mode="json") | {"dp": dp}
    content["parties"]["shop"]["width"] = content["parties"]["bank"]["width"]  # a sum needs that
    terms = Terms.model_validate(content)
    paths = leaves(terms.model_dump(mode="json"))
    paths = [path for path in paths if dp is None or path[0] == "dp"]
    assert _differ(terms, [path for path in paths if path[-1] not in RESTRICTED])


def test_branches_and_what_a_budget_is_of_change_the_digest(terms):
    content = terms.model_dump(mode="json") | {"dp": {"noise": 1.0}}
    content["parties"]["shop"]["branches"] = 3
    terms = Terms.model_validate(content)
    assert _differ(terms, [("parties", "shop", "branches"), ("dp", "unit")])


def test_a_shuffle_by_block_is_part_of_the_terms_and_a_full_one_as_before(terms):
    content = terms.model_dump(mode="json")
    content["train"]["block_rows"] = 7
    assert Terms.model_validate(content).digest() == terms.digest()
    content["train"]["shuffle"] = "blocks"
    blocks = Terms.model_validate(content)
    assert _differ(blocks, [("train", "block_rows"), ("train", "window_blocks")])
    assert blocks.digest() != terms.digest()


def test_who_serves_changes_the_digest(terms):
    task = {"weight": 1.0}
    content = terms.model_dump(mode="json") | {"mode": "serve", "tasks": {"insurer": task}}
    terms = Terms.model_validate(content)
    assert Terms.model_validate(content | {"serving": ["insurer"]}).digest() != terms.digest()


def test_what_an_evaluation_is_beside_changes_the_digest(terms):
    content = terms.model_dump(mode="json") | {"mode": "evaluate"}
    terms = Terms.model_validate(content)
    assert Terms.model_validate(content | {"beside": ["january"]}).digest() != terms.digest()


def test_who_learns_what_columns_add_changes_the_digest(terms):
    terms = Terms.model_validate(terms.model_dump(mode="json") | {"mode": "predict"})
    asked = terms.asked_with([f"{EXPLAIN}shop"])
    assert asked.explained == ("shop",)
    assert asked.digest() != terms.digest()
    with pytest.raises(ConfigError, match="'nobody' has no columns"):
        terms.asked_with([f"{EXPLAIN}nobody"])


def test_every_field_of_the_terms_is_required_or_the_version():
    assert [name for name, field in Terms.model_fields.items() if not field.is_required()] == [
        "version"
    ]


def test_the_order_of_parties_is_part_of_the_terms(terms):
    """Cuts are concatenated in that order."""
    turned = terms.model_copy(update={"parties": dict(reversed(terms.parties.items()))})
    assert turned.feature_parties == ["shop", "bank"]
    assert turned.digest() != terms.digest()


def test_the_digest_survives_json(terms):
    odd = terms.model_copy(update={"validation": 0.1 + 0.2})
    for one in (terms, odd):
        assert Terms.model_validate_json(one.model_dump_json()).digest() == one.digest()


def test_terms_are_the_public_part_of_an_experiment():
    experiment = Experiment.model_validate(
        {
            "parties": {
                "bank": {"columns": ["income"], "source": "secret.csv"},
                "lender": {"width": 4},
            },
            "label": {"party": "lender", "column": "defaulted", "top": "linear"},
        }
    )
    told = Terms.of(experiment, "train", "r").model_dump_json()
    for private in ("income", "secret.csv", "defaulted", "linear", "127.0.0.1"):
        assert private not in told


def test_who_sends_and_how_wide_the_merged_cut_is(terms):
    assert terms.feature_parties == ["bank", "shop"]
    assert terms.merged_width == 14
    with pytest.raises(SpecError, match="cuts of equal width"):
        _ = terms.model_copy(update={"merge": "sum"}).merged_width
    own = terms.model_copy(update={"label_party": "shop"})
    assert own.feature_parties == ["bank"]
    assert own.merged_width == 14
    assert terms.version == VERSION


@pytest.mark.parametrize(
    "settings",
    [{"run": "../up"}, {"run": ""}, {"codec": "x" * 513}, {"mode": "attack"}, {"more": 1}],
)
def test_terms_that_are_refused(terms, settings):
    with pytest.raises(ValidationError):
        Terms.model_validate(terms.model_dump() | settings)
