import resource
from dataclasses import replace

import numpy as np
import pytest
import torch
from frame_targets import SPECS
from torch import nn

from vfl.config import Consent, TrainSettings, with_overrides
from vfl.core.errors import ConsentError, SpecError, WidthError
from vfl.core.frame import HEADER_BYTES
from vfl.core.seeds import scoped
from vfl.core.version import VERSION
from vfl.defenses import DEFENSES
from vfl.models import BOTTOMS, Bottom, make_bottom
from vfl.models.footprint import _Allocations, footprint
from vfl.session import Terms, check_consent, check_dealers_consent
from vfl.session.consent import expected_bytes
from vfl.session.terms import DPTerms
from vfl.training.local import LocalSession


@pytest.fixture
def refusal(data):
    """The error a party raises to terms, or None."""

    def ask(terms, **consent):
        try:
            check_consent(terms, "bank", Consent(**consent), data["bank"].split)
        except ConsentError as error:
            return error
        return None

    return ask


def test_a_session_within_every_limit(terms, data, refusal):
    needed = expected_bytes(terms, "bank", data["bank"].split)
    assert refusal(terms) is None
    assert refusal(terms, max_width=8, max_epochs=2, max_bytes=needed) is None
    assert refusal(terms, codecs=("none", "topk:*"), versions=("0.0.9", VERSION)) is None


@pytest.mark.parametrize(
    ("changes", "consent", "asked", "allowed"),
    [
        ({"mode": "evaluate"}, {"modes": ("train",)}, "mode evaluate", "mode in train"),
        (
            {"purpose": "marketing"},
            {"purposes": ("credit risk*",)},
            "purpose marketing",
            "purpose in credit risk*",
        ),
        ({}, {"purposes": ("credit*",)}, "purpose not named", "purpose in credit*"),
        ({}, {"codecs": ("none", "topk:k=2")}, "codec topk:k=3", "codec in none, topk:k=2"),
        ({}, {"codecs": ()}, "codec topk:k=3", "codec in "),
        (
            {"defense": "layer_norm"},
            {"defenses": ("none",)},
            "defense layer_norm",
            "defense in none",
        ),
        (
            {"defense": "none+layer_norm"},
            {"defenses": ("none",)},
            "defense layer_norm",
            "defense in none",
        ),
        ({}, {"max_width": 7}, "width 8", "width <= 7"),
        ({}, {"max_epochs": 1}, "epochs 2", "epochs <= 1"),
        ({"train": TrainSettings(epochs=2, compile=True)}, {}, "compiled models", "compile = true"),
        ({"version": "9.9"}, {}, "vfl 9.9", f"vfl in {VERSION}"),
        ({}, {"versions": ("8.8",)}, f"vfl {VERSION}", "vfl in 8.8"),
        ({}, {"min_dp_noise": 1.0}, "no [dp]", "dp noise >= 1"),
        ({"dp": DPTerms(noise=0.9)}, {"min_dp_noise": 1.0}, "dp noise 0.9", "dp noise >= 1"),
    ],
)
def test_each_difference_is_told(terms, refusal, changes, consent, asked, allowed):
    error = refusal(terms.model_copy(update=changes), **consent)
    assert error.what == "party 'bank' does not consent to this session"
    assert (error.got, error.want) == (asked, allowed)


def test_branches_are_for_one_process(terms, refusal):
    bank = terms.parties["bank"].model_copy(update={"branches": 4})
    branched = {"parties": terms.parties | {"bank": bank}, "dp": DPTerms(noise=1.0)}
    assert refusal(terms.model_copy(update=branched)).got == "branches of 'bank'"


def test_models_that_may_cost_a_row_more_than_a_party_allows(terms, data, refusal):
    rows = len(data["bank"].split.train)
    private = terms.model_copy(update={"dp": DPTerms(epsilon=2.0)})
    assert refusal(private, max_dp_epsilon=2.0, min_dp_noise=0.1) is None
    assert refusal(private, max_dp_epsilon=1.9).want == f"dp epsilon <= 1.9, delta < 1/{rows}"
    careless = terms.model_copy(update={"dp": DPTerms(epsilon=2.0, delta=2 / rows)})
    wide = {"dp.delta": (1e-12, 0.5)}  # else the range of the number refuses it first
    assert refusal(careless, max_dp_epsilon=2.0, ranges=wide).got.startswith("dp epsilon 2, delta")
    evaluation = terms.model_copy(update={"mode": "evaluate"})
    assert refusal(evaluation, max_dp_epsilon=1.0) is None


@pytest.fixture
def asked(data):
    """The error a party raises to terms that name its bottom, or None."""

    def ask(terms, shape=(64,), **consent):
        split = data["bank"].split
        try:
            check_consent(terms, "bank", Consent(**consent), split, row_shape=shape)
        except ConsentError as error:
            return error
        return None

    return ask


def with_bottom(terms, bottom, **train):
    bank = terms.parties["bank"].model_copy(update={"bottom": bottom})
    settings = terms.train.model_copy(update=train)
    return terms.model_copy(update={"parties": terms.parties | {"bank": bank}, "train": settings})


BUNDLED = [
    ("mlp:hidden=1024-1024", (3072,)),
    ("cnn", (1, 28, 14)),
    ("resnet20:widen=2", (3, 32, 32)),
    ("efficientnet_b0", (3, 64, 64)),
    ("vit", (3, 128, 128)),
    ("gru4rec:items=40000", (20,)),
    ("textcnn:words=20000", (400,)),
]


@pytest.mark.parametrize(("bottom", "shape"), BUNDLED)
def test_bundled_bottoms_are_within_the_default(terms, asked, bottom, shape):
    wide = terms.parties["bank"].model_copy(update={"width": 96})
    terms = terms.model_copy(update={"parties": terms.parties | {"bank": wide}})
    assert asked(with_bottom(terms, bottom), shape) is None


@pytest.mark.parametrize(
    ("bottom", "shape"),
    [
        ("mlp:hidden=20000-20000", (64,)),
        ("mlp:hidden=" + "-".join(["1048576"] * 32), (64,)),
        ("vit:layers=64,tokens=16384", (3, 128, 128)),
        ("textcnn:words=16777216,embedding=16384", (50,)),
        ("gru4rec:items=16777216", (50,)),
    ],
)
def test_a_bottom_is_refused_before_it_is_built(terms, asked, bottom, shape):
    wide = terms.parties["bank"].model_copy(update={"width": 9})
    terms = terms.model_copy(update={"parties": terms.parties | {"bank": wide}})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = asked(with_bottom(terms, bottom), shape)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    assert "parameters in bottom" in error.got
    assert error.want.startswith("parameters <= 20000000")


def test_the_optimiser_and_the_activations_count(terms, asked):
    small = with_bottom(terms, "mlp:hidden=64-64")  # 65 * 64 + 65 * 64 + 65 * 8 parameters
    parameters = 2 * 65 * 64 + 65 * 8
    made = 64 + 2 * (64 + 64) + 8  # the inputs, and what each layer makes of them
    backward, coding = made // 2 + 4 * 64, 32 * 8
    needed = 4 * (4 * parameters + 50 * (made + backward + coding))  # two copies are Adam's
    assert asked(small, max_memory_bytes=needed) is None
    error = asked(small, max_memory_bytes=needed - 1)
    assert error.got.startswith(f"about {needed} bytes of memory")
    assert asked(with_bottom(terms, "mlp:hidden=64-64", optimizer="sgd", momentum=0.0),
                 max_memory_bytes=needed - 8 * parameters) is None  # fmt: skip


def test_a_passport_is_counted_with_the_bottom(terms, asked):
    large = terms.model_copy(update={"defense": "passport:count=1024"})
    assert asked(large) is None
    weights = 8 * 8 + (8 + 1) * 2 + (2 + 1) * 8
    error = asked(large, max_parameters=65 * 4 + 5 * 8 + weights - 1)
    assert error.got.startswith(f"{65 * 4 + 5 * 8 + weights} parameters in bottom mlp:hidden=4")
    passports = 4 * 2 * 1024 * 8
    assert asked(large, max_memory_bytes=passports + 4 * 4 * weights) is not None


def test_matrices_over_the_rows_of_a_batch_are_counted(terms, data):
    rows = 7000
    split = replace(data["bank"].split, train=np.arange(rows))
    settings = terms.train.model_copy(update={"batch_size": rows})
    asked = terms.model_copy(update={"defense": "nopeek", "train": settings})
    needed = 6 * 4 * rows**2
    with pytest.raises(ConsentError) as refused:
        check_consent(asked, "bank", Consent(max_memory_bytes=needed), split, row_shape=(64,))
    assert "and defense nopeek" in refused.value.got
    check_consent(asked, "bank", Consent(max_memory_bytes=2 * needed), split, row_shape=(64,))
    settings = terms.train.model_copy(update={"batch_size": 65_536})
    split = replace(split, train=np.arange(100_000))
    wide = asked.model_copy(update={"train": settings})
    with pytest.raises(ConsentError, match="bytes of memory"):
        check_consent(wide, "bank", Consent(), split, row_shape=(64,))


def test_the_epochs_of_a_defense_are_epochs(terms, asked):
    long = terms.model_copy(update={"defense": "label_free:kind=autoencoder,epochs=50"})
    assert asked(long, max_epochs=52) is None
    error = asked(long, max_epochs=51)
    assert (
        error.got
        == f"epochs 2 and 50 epochs before the training, in the fit of defense {long.defense}"
    )
    assert error.want == "epochs <= 51"
    rebuilt = long.model_copy(update={"defense": "label_free:epochs=50"})
    assert asked(rebuilt, max_epochs=2) is None  # components take none


def test_rows_that_no_session_has_are_counted_where_a_defense_looks_at_them(terms, data):
    rows = 10**6
    asked = terms.model_copy(update={"defense": "pretrained:epochs=1"})
    split, own = data["bank"].split, {"row_shape": (64,)}
    most = Consent(max_memory_bytes=4 * 64 * rows)
    check_consent(asked, "bank", most, split, **own)
    with pytest.raises(ConsentError, match=r"bytes of memory .* pretrained"):
        check_consent(asked, "bank", most, split, **own, unaligned=rows)
    check_consent(terms, "bank", most, split, **own, unaligned=rows)  # nothing looks at them


@pytest.mark.parametrize(
    "defense", [name for name in DEFENSES.names() if not DEFENSES.member(name).of_words]
)
def test_every_defense_of_the_package_is_within_the_default(terms, asked, defense):
    spec = "label_dp:epsilon=1" if defense == "label_dp" else defense
    assert asked(terms.model_copy(update={"defense": spec})) is None


@pytest.mark.parametrize("codec", [*SPECS, "size:k=2,kind=mask", "sign:width=16"])
def test_every_codec_of_the_package_is_within_the_default(terms, asked, codec):
    assert asked(terms.model_copy(update={"codec": codec})) is None


def test_what_a_codec_puts_around_the_bottom_counts(terms, asked):
    wide = terms.model_copy(update={"codec": "sign:width=65536"})
    assert asked(wide).got == "width 65536 behind codec sign:width=65536"
    error = asked(wide, max_width=65536, max_parameters=8 * 65536)
    assert "parameters in bottom" in error.got
    with pytest.raises(WidthError):
        asked(terms.model_copy(update={"codec": f"size:k={10**9}"}))


class Unknowable(nn.Module):
    def forward(self, inputs):
        return inputs[: int(inputs.sum())]


class UnknowableBottom(Bottom):
    def build(self, shape, width):
        return Unknowable()


def test_a_bottom_that_cannot_be_counted_is_refused(terms, asked, monkeypatch):
    monkeypatch.setitem(BOTTOMS._members, "unknowable", UnknowableBottom)
    with pytest.raises(SpecError, match="cannot be computed") as refused:
        asked(with_bottom(terms, "unknowable"))
    assert "party's own file" in refused.value.fix


@pytest.mark.parametrize(
    ("bottom", "shape"),
    [("textcnn:words=50", (40,)), ("gru4rec:items=50", (40,)), ("cnn", (1, 8, 8)),
     ("vit:patch=4,tokens=8,layers=1,heads=2", (1, 8, 8))],
)  # fmt: skip
def test_counted_is_what_really_is_made(bottom, shape):
    """Shapes alone against numbers, on as many rows."""
    counted = footprint(make_bottom(bottom), shape, 9, batch_size=7)
    with scoped(0):
        module = make_bottom(bottom).build(shape, 9).train()
    inputs = torch.ones(7, *shape)
    with torch.no_grad(), _Allocations([inputs, *module.parameters(), *module.buffers()]) as made:
        module(inputs)
    needed = sum(made.sizes) + inputs.numel() * 4
    assert needed <= counted.batch_bytes * 1.1 <= 4 * needed


@pytest.fixture
def dealt(experiment):
    """Terms under which a third party deals to one feature party."""
    content = experiment.model_dump(exclude_none=True)
    content |= {"merge": "sum", "secure": "beaver:dealer=notary", "codec": "none"}
    content["parties"] = {"bank": {"width": 8, "bottom": "mlp:hidden=none"}}
    return Terms.of(type(experiment).model_validate(content), "train", "trial-1")


def test_a_stated_number_of_parties_holds_beside_a_third_one_too(dealt, data, refusal):
    assert refusal(dealt) is None
    assert refusal(dealt, min_parties=1) is None
    error = refusal(dealt, min_parties=5)
    assert (error.got, error.want) == ("1 feature parties", "at least 5 in a secure mode")
    with pytest.raises(ConsentError, match="1 feature parties"):
        check_dealers_consent(dealt, "notary", Consent(min_parties=5))
    check_dealers_consent(dealt, "notary", Consent())


def test_parties_batches_and_rows_are_bounded(terms, refusal):
    error = refusal(terms, max_parties=1, max_batch_size=49, max_rows=199)
    assert error.got == "2 parties; batch_size 50; 200 rows"
    assert error.want == "parties <= 1; batch_size <= 49; rows <= 199"
    assert refusal(terms, max_parties=2, max_batch_size=50, max_rows=200) is None


def test_one_byte_too_many(terms, data, refusal):
    needed = expected_bytes(terms, "bank", data["bank"].split)
    error = refusal(terms, max_bytes=needed - 1)
    assert (error.got, error.want) == (f"up to {needed} bytes", f"bytes <= {needed - 1}")


def test_all_differences_are_told_together(terms, refusal):
    asking = terms.model_copy(update={"defense": "layer_norm+none", "version": "9.9"})
    error = refusal(
        asking, modes=("predict",), codecs=("none",), defenses=("x",), max_width=1, max_epochs=1
    )
    assert error.got == (
        "mode train; codec topk:k=3; defense layer_norm; defense none; width 8; epochs 2; vfl 9.9"
    )
    assert error.want == (
        f"mode in predict; codec in none; defense in x; defense in x; width <= 1; epochs <= 1; "
        f"vfl in {VERSION}"
    )
    assert error.exit_code == 3


def test_epochs_are_those_of_a_training(terms, refusal):
    """Rows of a long training may be evaluated by a party that would not train so long again."""
    assert refusal(terms.model_copy(update={"mode": "evaluate"}), max_epochs=1) is None


def test_patterns_tell_capitals_apart_and_match_whole_specs(terms, refusal):
    assert refusal(terms, codecs=("TOPK:*",)) is not None
    assert refusal(terms, codecs=("topk",)) is not None
    assert refusal(terms, codecs=("topk*",)) is None


CODEC_SPECS = {
    "none": ["none"],
    "topk": ["topk:k=3", "topk:k=1,values=1", "topk:k=6,values=8,packer=index"],
    "randtopk": ["randtopk:k=3,alpha=0.5", "randtopk:k=2,values=8"],
}


@pytest.mark.parametrize("mode", ["train", "evaluate", "predict"])
@pytest.mark.parametrize("codec", [spec for specs in CODEC_SPECS.values() for spec in specs])
def test_no_session_takes_more_bytes_than_expected(experiment, data, codec, mode):
    experiment = with_overrides(experiment, [f"codec={codec}"])
    session = LocalSession(experiment, data, mode=mode, outputs=10).run()
    up, down = (session.ledger.bytes_by_party(way) for way in ("up", "down"))
    for party in ("bank", "shop"):
        expected = expected_bytes(session.terms, party, data[party].split)
        taken = up[party] + down[party]
        assert taken <= expected < 3 * taken + 100 * HEADER_BYTES


@pytest.mark.parametrize("parties", [1, 2, 3])
def test_a_secure_mode_takes_two_feature_parties_unless_a_third_one_deals(
    experiment, refusal, parties
):
    """A party's own consent, whatever the mode itself takes: a sum of one cut is that cut."""
    names = ("bank", "shop", "club")[:parties]
    content = experiment.model_dump(exclude_none=True) | {"merge": "sum", "codec": "none"}
    content["parties"] = {name: {"width": 8, "bottom": "mlp:hidden=none"} for name in names}
    plain = Terms.of(type(experiment).model_validate(content), "train", "trial-1")
    error = refusal(plain.model_copy(update={"secure": "sum"}))
    if parties > 1:
        assert error is None
    else:
        assert (error.got, error.want) == ("1 feature parties", "at least 2 in a secure mode")
