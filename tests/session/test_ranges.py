"""Every number that a peer chooses has a range, and a party's own file may set another."""

import math

import pytest
from pydantic import Field

from vfl.compression import CODECS
from vfl.config import Consent, Experiment, TrainSettings
from vfl.config.experiment import MiddleSettings
from vfl.config.toml import Settings, check
from vfl.core.errors import BadOptionError, ConfigError, ConsentError, SpecError
from vfl.defenses import DEFENSES
from vfl.mpc.secure import pea, permuted
from vfl.session import SessionMessage, Terms, check_consent, handshake
from vfl.session.consent import (
    check_alignment,
    check_dealers_consent,
    check_middles_consent,
    check_tasks_consent,
)
from vfl.session.ranges import (
    DERIVED,
    FAMILIES,
    USUAL,
    default_ranges,
    limiting_settings,
    numbers_of,
    out_of_range,
    ranges_of,
    schema_ranges,
    schemas_of_products,
)
from vfl.session.terms import AlignTerms, DPTerms, TaskTerms
from vfl.testing import CodecContract, DefenseContract

TOLD = (SessionMessage, handshake.Introduction, handshake.PartyReport)
TOLD += (permuted.Facts, pea.OwnFacts, pea.Facts)
#: What the schema bounds, at and beyond what floats and 64-bit integers hold.
EXTREMES = ("0", "1e-300", "1e-6", "1e-3", "0.999", "1", "64", "1e3", "1e6", "1e9")
BEYOND = ("1e300", "inf", "nan", "-1", "-1e300", str(2**63))
#: Options whose largest value is a word for no bound, or whose -1 is one for all.
UNBOUNDED = {"clipped_noise:norm=inf", "gradient_noise:norm=inf", "pretrained:layer=-1,name=small"}
NEEDED = {"randtopk:alpha": "k=2", "gru4rec:embedding": "items=5", "gru4rec:dropout": "items=5"}
NEEDED |= {
    f"pretrained:{option}": "name=small" for option in ("layer", "rank", "alpha", "tail", "tokens")
}
NEEDED |= {f"{name}:bits": "rank=2" for name in ("decoder_front", "decoder_middle", "decoder")}
NEEDED |= {"bottlenet:psnr": "k=2"}


#: Families whose members torch checks, and those without a numeric option.
OF_TORCH, NO_NUMBERS = ["optimizer", "schedule"], {"merger"}
OWN = sorted(FAMILIES.keys() - OF_TORCH)


@pytest.fixture
def full(terms):
    """Terms with every number there is; no session has all of these parts at once."""
    parts = {
        "train": terms.train.model_copy(update={"optimizer": "sgd"}),  # whose momentum is a setting
        "middle": MiddleSettings(),
        "tasks": {"insurer": TaskTerms(weight=1.0)},
        "dp": DPTerms(epsilon=2.0, noise=1.0, clips={"bank": 1.0}, quantile=0.5),
    }
    return terms.model_copy(update=parts)


def numbers():
    return {**default_ranges(), **dict.fromkeys(limiting_settings())}


def test_every_number_of_the_terms_has_a_range_or_a_setting_of_its_own(full):
    schemas = [schema_ranges(Terms), schema_ranges(AlignTerms)]
    usual = dict(USUAL)
    for prefix, schema in schemas_of_products().items():
        schemas.append(schema_ranges(schema, prefix))
        usual |= {f"{prefix}.{name}": ends for name, ends in schema.usual_ranges.items()}
    assert set().union(*schemas, DERIVED) == set(numbers())
    assert {name for name, _ in numbers_of(full)} == set(schemas[0])
    assert set(limiting_settings().values()) <= set(Consent.model_fields)
    assert usual.keys() <= default_ranges().keys()
    for schema in schemas:
        for name in schema.keys() & usual.keys():
            assert schema[name][0] <= usual[name][0] < usual[name][1] <= schema[name][1], name
    assert all(math.isfinite(end) for ends in default_ranges().values() for end in ends)


class Loose(Settings):
    rates: dict[str, float] = Field(default={}, max_length=3)


class Half(Settings):
    inside: tuple[Loose, ...] = ()
    steps: int | None = Field(default=None, ge=0)


@pytest.mark.parametrize(("schema", "named"), [(Loose, "rates"), (Half, "inside.rates")])
def test_a_new_number_without_bounds_is_noticed(schema, named):
    with pytest.raises(TypeError, match=f"^{named} is a number"):
        schema_ranges(schema)


@pytest.mark.parametrize("schema", TOLD, ids=lambda schema: schema.__name__)
def test_every_number_that_a_peer_says_is_bounded(schema):
    assert schema_ranges(schema)


OF_TERMS = [
    name for name in default_ranges() if name.partition(".")[0] not in schemas_of_products()
]


@pytest.mark.parametrize("name", OF_TERMS)
def test_a_party_narrows_every_number(name, full):
    value = DERIVED[name][1](full) if name in DERIVED else dict(numbers_of(full))[name]

    def asked(least, most):
        return list(out_of_range(full, Consent(ranges={name: (least, most)})))

    assert asked(value, value) == []
    for ends in ((value + 1, value + 2), (value - 2, value - 1)):
        ((asked_for, allowed),) = asked(*ends)
        assert asked_for == f"{name} {value}"
        assert allowed == f"{name} from {ends[0]:g} to {ends[1]:g}"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learning_rate": 11.0}, "train.learning_rate"),
        ({"weight_decay": 0.999999}, "train.weight_decay"),
        ({"momentum": 0.9999}, "train.momentum"),
    ],
)
def test_what_a_file_that_says_nothing_accepts(terms, data, change, named):
    asked = terms.model_copy(update={"train": TrainSettings(**change)})
    with pytest.raises(ConsentError) as caught:
        check_consent(asked, "bank", Consent(), data["bank"].split)
    assert caught.value.got.split() == [named, f"{change[named.partition('.')[2]]}"]
    wider = Consent(ranges={named: (0, 1000)})
    check_consent(asked, "bank", wider, data["bank"].split)


def test_no_step_takes_much_off_every_weight(terms, data):
    """A learning rate and a weight decay that are each accepted leave no weight together."""
    asked = terms.model_copy(update={"train": TrainSettings(learning_rate=10.0, weight_decay=0.1)})
    with pytest.raises(ConsentError) as caught:
        check_consent(asked, "bank", Consent(), data["bank"].split)
    assert caught.value.want == "train.decay_of_a_step from 0 to 0.01"
    wider = Consent(ranges={"train.decay_of_a_step": (0, 1)})
    check_consent(asked, "bank", wider, data["bank"].split)


@pytest.mark.parametrize(
    "asks",
    [
        lambda terms, consent, split: check_consent(terms, "bank", consent, split),
        lambda terms, consent, split: check_dealers_consent(terms, "dealer", consent),
        lambda terms, consent, split: check_middles_consent(terms, "middle", consent, split),
        lambda terms, consent, split: check_tasks_consent(terms, "insurer", consent, split, 2),
        lambda terms, consent, split: check_alignment(terms, "bank", consent),
    ],
    ids=["feature", "dealer", "middle", "task", "alignment"],
)
def test_every_party_is_asked(terms, data, asks):
    with pytest.raises(ConsentError) as caught:
        asks(terms, Consent(ranges={"seed": (6, 9)}), data["bank"].split)
    assert (caught.value.got, caught.value.want) == ("seed 5", "seed from 6 to 9")


@pytest.mark.parametrize("mode", ["train", "evaluate", "predict", "serve"])
def test_every_mode_is_asked_but_an_alignment_has_no_training(terms, mode):
    narrow = Consent(ranges={"train.learning_rate": (0, 1e-9)})
    assert list(out_of_range(terms.model_copy(update={"mode": mode}), narrow))
    aligned = AlignTerms.asked(Experiment.model_validate({"parties": {"bank": {}}}), "run")
    assert not list(out_of_range(aligned, narrow))


@pytest.mark.parametrize(
    ("asked", "name", "least", "refused"),
    [
        ({"codec": "topk:k=3"}, "codec.topk.k", 4, True),
        ({"codec": "topk:k=3"}, "codec.randtopk.k", 4, False),
        ({"defense": "clipped_noise"}, "defense.clipped_noise.sigma", 0.2, True),
        ({"defense": "clipped_noise:sigma=4"}, "defense.clipped_noise.sigma", 0.2, False),
        ({"defense": "layer_norm+clipped_noise:norm=1e-3"}, "defense.clipped_noise.norm", 1, True),
        ({"defense": "clipped_noise:norm=inf"}, "defense.clipped_noise.norm", 1, True),
        ({"defense": "mid:alpha=0.5"}, "defense.bottleneck.alpha", 1, True),
        ({"secure": "sum:bits=16"}, "secure.sum.bits", 32, True),
        ({"middle": MiddleSettings(codec="topk:k=3")}, "codec.topk.k", 4, True),
        ({"middle": MiddleSettings(model="vit:dropout=0.5")}, "bottom.vit.dropout", 0.6, True),
        ({"tasks": {"other": TaskTerms(weight=1, top="mlp")}}, "top.mlp.dropout", 0.1, True),
    ],
)
def test_a_party_narrows_the_options_of_plug_ins(terms, asked, name, least, refused):
    found = list(out_of_range(terms.model_copy(update=asked), Consent(ranges={name: (least, 99)})))
    assert [text.split()[0] for text, _ in found] == [name] * refused


def test_padding_has_a_range():
    content = {"parties": {"bank": {}}, "align": {"protocol": "ecdh:pad=5000"}}
    terms = AlignTerms.asked(Experiment.model_validate(content), "run")
    narrow = Consent(ranges={"alignment.ecdh.pad": (0, 4000)})
    assert [asked for asked, _ in out_of_range(terms, narrow)] == ["alignment.ecdh.pad 5000"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("train.learning_rat", "train.learning_rate"),
        ("train.epochs", "max_epochs"),
        ("defense.clipped_noise.sigm", "defense.clipped_noise.sigma"),
        ("defense.clipped_nose.sigma", None),
        ("nobody.knows.it", None),
    ],
)
def test_a_range_of_nothing_is_refused(name, hint):
    with pytest.raises(ConfigError, match=hint) as caught:
        ranges_of(Consent(ranges={name: (0, 1)}))
    assert caught.value.got == name


@pytest.mark.parametrize("ends", [[1, 0], [0], [0, 1, 2], [0, math.inf], [math.nan, 1], ["a", 1]])
def test_a_range_is_two_numbers_that_ascend(ends):
    with pytest.raises(ConfigError, match="ranges"):
        check({"ranges": {"train.learning_rate": ends}}, Consent, "party.toml")


def test_a_dotted_name_needs_no_quotes():
    nested = {"train": {"learning_rate": [0, 1]}, "defense": {"clipped_noise": {"norm": [1, 2]}}}
    assert Consent(ranges=nested).ranges == {
        "train.learning_rate": (0, 1), "defense.clipped_noise.norm": (1, 2),
    }  # fmt: skip


def made(family, values):
    """Specs of a family that set one numeric option each, and are accepted."""
    registry = FAMILIES[family]
    for name in registry.names():
        for option in registry.numeric(name):
            for value in values:
                whole = "int" in str(registry.options(name)[option].annotation)
                text = str(int(float(value))) if whole and float(value) == 0 else value
                text = str(int(float(value))) if whole and 1 <= float(value) < 2**62 else text
                more = NEEDED.get(f"{name}:{option}")
                spec = f"{name}:{option}={text}" + (f",{more}" if more else "")
                try:
                    registry.make(spec)
                except SpecError:
                    continue
                yield spec


@pytest.mark.parametrize("family", OWN)
def test_no_option_of_any_plug_in_is_unbounded(family):
    numeric = [name for name in FAMILIES[family].names() if FAMILIES[family].numeric(name)]
    assert numeric or family in NO_NUMBERS, "nothing was tried"
    assert set(made(family, BEYOND)) <= UNBOUNDED


@pytest.mark.parametrize("family", OF_TORCH)
def test_no_option_of_a_member_of_torch_is_unbounded(family):
    registry = FAMILIES[family]
    for name in registry.names():
        needed = {
            key: "1" for key, one in registry.options(name).items() if one.default is one.empty
        }
        for option in registry.numeric(name):

            def spec(value, name=name, given=needed, option=option):
                return f"{name}:" + ",".join(
                    f"{key}={one}" for key, one in (given | {option: value}).items()
                )

            assert registry.read(spec("1"))[1][option] == 1
            for value in set(BEYOND) - {"-1"}:  # a sign is torch's matter
                with pytest.raises(BadOptionError):
                    registry.read(spec(value))


@pytest.mark.parametrize("family", OWN)
def test_every_option_accepts_something(family):
    """So that the test above fails for a bound, and for no other reason."""
    registry = FAMILIES[family]
    tried = {spec.partition("=")[0] for spec in made(family, [*EXTREMES, "3", "8", "16", "0.1"])}
    wanted = {f"{name}:{one}" for name in registry.names() for one in registry.numeric(name)}
    assert wanted <= tried


def test_defenses_stay_finite_at_the_ends_of_their_options():
    two_classes = type("TwoClasses", (DefenseContract,), {"classes": 2})
    ends = ("0", "1e-300", "1e-6", "1e6", "1e9")
    for spec in dict.fromkeys(made("defense", ends)):
        if ":epochs=" in spec and not spec.endswith(":epochs=1"):
            continue  # more of the same
        contract = two_classes() if spec.startswith("marvell") else DefenseContract()
        contract.test_hooks_keep_shapes_and_are_reproducible(spec)
        for stated in DEFENSES.make(spec).privacy():
            assert stated.epsilon is None or math.isfinite(stated.epsilon)


def test_codecs_stay_finite_at_the_ends_of_their_options():
    contract = CodecContract()
    for spec in dict.fromkeys(made("codec", EXTREMES)):
        try:
            CODECS.make(spec).check(contract.width)
        except SpecError:
            continue
        for training in (True, False):
            contract.test_cut_and_gradient_round_trip(spec, training)
