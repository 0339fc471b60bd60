import resource

import pytest

from vfl.compression import CODECS
from vfl.config import Consent, with_overrides
from vfl.core.errors import ConsentError
from vfl.core.frame import HEADER_BYTES
from vfl.core.version import VERSION
from vfl.session import Terms, check_consent
from vfl.session.consent import expected_bytes
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
        ({"version": "9.9"}, {}, "vfl 9.9", f"vfl in {VERSION}"),
        ({}, {"versions": ("8.8",)}, f"vfl {VERSION}", "vfl in 8.8"),
    ],
)
def test_each_difference_is_told(terms, refusal, changes, consent, asked, allowed):
    error = refusal(terms.model_copy(update=changes), **consent)
    assert error.what == "party 'bank' does not consent to this session"
    assert (error.got, error.want) == (asked, allowed)


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
    activations = 64 + 2 * (64 + 64) + 8
    needed = 4 * (4 * parameters + 50 * activations)  # weights, gradients, two of Adam
    assert asked(small, max_memory_bytes=needed) is None
    error = asked(small, max_memory_bytes=needed - 1)
    assert error.got.startswith(f"about {needed} bytes of memory")
    assert asked(with_bottom(terms, "mlp:hidden=64-64", optimizer="sgd", momentum=0.0),
                 max_memory_bytes=needed - 8 * parameters) is None  # fmt: skip


def test_parties_batches_and_rows_are_bounded(terms, refusal):
    error = refusal(terms, max_parties=1, max_batch_rows=49, max_rows=199)
    assert error.got == "2 parties; batch_rows 50; 200 rows"
    assert error.want == "parties <= 1; batch_rows <= 49; rows <= 199"
    assert refusal(terms, max_parties=2, max_batch_rows=50, max_rows=200) is None


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


def test_every_codec_of_the_package_is_estimated():
    assert set(CODEC_SPECS) <= set(CODECS.names())


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


def test_expected_bytes_by_hand(experiment, data):
    """200 rows: 140 to train in batches of 50, 50, 40; 20 for validation; 40 for the test."""
    dense = with_overrides(experiment, ["codec=none"])
    terms = Terms.of(dense, "train", "r")
    frames = 2 * 2 * (3 + 1) + 2
    slack = 64  # what the contract adds to every payload by default
    payloads = 2 * (2 * 140 + 20) + 40
    encoded = 2 * (2 * 3 + 1) + 1
    expected = 4 * 8 * payloads + slack * encoded + HEADER_BYTES * frames
    assert expected_bytes(terms, "bank", data["bank"].split) == expected
