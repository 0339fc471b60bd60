"""Damaged session messages, introductions and reports: an error of ours, or a session as agreed."""

import gc
import json
import random
import typing
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from frame_targets import SPECS
from mutate import mutated_json

from vfl.clients import FeatureParty
from vfl.compression import CODECS
from vfl.config import Consent
from vfl.core.errors import SpecError, VFLError
from vfl.core.frame import Frame, Kind
from vfl.core.seeds import Secret
from vfl.defenses import DEFENSES
from vfl.models import BOTTOMS
from vfl.session import Introduction, PartyReport, SessionMessage, check_consent, rules
from vfl.session.consent import frame_limits
from vfl.session.exchange import Own
from vfl.session.secure_mode import SECURE
from vfl.transport import Hello, local_pair

CASES = [150, pytest.param(100_000, marks=pytest.mark.slow)]
MOST_GROWN = 64 * 1024 * 1024
#: A party of modest means; what it consents to is really built.
CONSENT = Consent(max_parameters=100_000, max_memory_bytes=20_000_000, max_epochs=5)
BOTTOMS_AND_OPTIONS = (
    "mlp:hidden=8,dropout=0.5", "mlp:hidden=8-8,last=relu",
    "textcnn:words=20,embedding=4", "gru4rec:items=20,embedding=4",
    "vit:patch=4,tokens=8,layers=1,heads=2", "cnn:channels=2-4",
)  # fmt: skip
#: What an option may suddenly be, by its type.
NUMBERS = (
    "0", "1", "2", "3", "4", "8", "-1", "64", "1000", "65537", "4000000", "1000000000", str(2**31),
    str(2**63), str(10**15), "9" * 300, "0.5", "0.01", "1e-9", "1e-308", "1e308", "inf", "nan",
)  # fmt: skip
WORDS = ("none", "8", "4", "fp32", "bf16", "8-8", "64-" * 40 + "1", "9" * 100, "notary", "0.5-0.5")


def wild(registry, draw):
    """A spec of any member, some of whose options are wild."""
    name = draw.choice(registry.names())
    given = []
    for key, option in registry.options(name).items():
        if option.default is option.empty or draw.random() < 0.4:
            kinds = typing.get_args(option.annotation) or (option.annotation,)
            if typing.get_origin(option.annotation) is typing.Literal:
                choices = (*kinds, "x")
            elif bool in kinds:
                choices = ("yes", "no", "2")
            else:
                choices = WORDS if str in kinds else NUMBERS
            given.append(f"{key}={draw.choice(choices)}")
    return name + ":" * bool(given) + ",".join(given)


def rss_bytes():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024


def hammer(cases, one):
    """Every case ends well or in an error of vfl's own, and memory stays where it was."""
    failed, refused = [], 0
    for case in range(50):  # caches
        outcome(one, case)
    gc.collect()
    before = rss_bytes()
    most = before
    for case in range(cases):
        problem = outcome(one, case)
        refused += problem == "refused"
        if problem not in ("", "refused"):
            failed.append((case, problem))
        if case % 500 == 0:
            most = max(most, rss_bytes())
    assert failed == [], failed[:5]
    assert max(most, rss_bytes()) - before < MOST_GROWN
    return refused


def outcome(one, case):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one(case)
    except VFLError as error:
        return "refused" if len(str(error)) < 20_000 else "an error of more than 20,000 characters"
    except Exception as bug:  # any other is what fuzzing looks for
        return f"{type(bug).__name__}: {bug}"[:300]
    return ""


@pytest.fixture(scope="module", autouse=True)
def imported():
    """What members import at their first use is no growth; torchvision alone takes 150 MB."""
    for registry in (CODECS, DEFENSES, BOTTOMS, SECURE):
        for name in registry.names():
            registry.member(name)
    import_module("torchvision.models")


@pytest.fixture
def valid(terms):
    return SessionMessage(
        session="0" * 32,
        token="t0ken-" * 7,
        node="17",
        host="lender.example",
        port=9443,
        ca_pem="-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        idle_timeout_s=60,
        rejoin_window_s=8,
        terms=terms,
    )


@pytest.mark.parametrize("cases", CASES)
def test_session_messages(valid, data, cases):
    own, record = data["bank"], json.loads(valid.model_dump_json())

    def one(case):
        draw = random.Random(case)
        terms = record["terms"] | {"codec": draw.choice(SPECS)}
        if draw.random() < 0.5:
            terms["defense"] = draw.choice(DEFENSES.names())
        bottom = draw.choice([*BOTTOMS_AND_OPTIONS, *BOTTOMS.names()])
        parties = terms["parties"] | {"bank": {"width": 8, "bottom": bottom}}
        changed = record | {"terms": terms | {"parties": parties}}
        message = SessionMessage.parse(mutated_json(changed, 0, case))
        asked = message.terms
        if own.name not in asked.feature_parties:
            return
        check_consent(asked, own.name, CONSENT, own.split, row_shape=tuple(own.inputs.shape[1:]))
        frame_limits(asked, own.name, own.split)
        Introduction.of(own, asked, message.session)
        link, _ = local_pair()
        FeatureParty(own, asked, link, Own(Secret.of_simulation(0, "bank")))

    assert hammer(cases, one) > cases / 3


@pytest.mark.parametrize("axes", [(-1,), (-1, 4, 4)], ids=["columns", "pictures"])
@pytest.mark.parametrize("cases", CASES)
def test_options_with_wild_numbers(valid, data, cases, axes):
    """What a party consents to it builds, fits and sends a first cut of, in little memory."""
    own, record, built = data["bank"], json.loads(valid.model_dump_json()), []
    own = replace(own, inputs=own.inputs.reshape(len(own.inputs), *axes))

    def one(case):
        draw = random.Random(case)
        asked = {name: record["terms"][name] for name in ("codec", "defense", "secure")}
        bottom = draw.choice(("mlp:hidden=8", "cnn:channels=2-4") if len(axes) > 1 else (
            "mlp:hidden=8", "mlp:hidden=none"))  # fmt: skip
        for setting in draw.sample(("codec", "defense", "defense", "bottom", "secure"), 2):
            if setting == "bottom":
                bottom = wild(BOTTOMS, draw)
            elif setting == "defense":
                chain = [wild(DEFENSES, draw) for _ in range(draw.choice((1, 1, 2)))]
                asked["defense"] = "+".join(chain)
            else:
                asked[setting] = wild({"codec": CODECS, "secure": SECURE}[setting], draw)
        settings = {}
        if asked["secure"] != "none":
            asked |= {"merge": "sum", "codec": "none"}
            settings = {"optimizer": "sgd", "momentum": 0}
            bottom = "mlp:hidden=none"
        terms = record["terms"] | asked | {"train": record["terms"]["train"] | settings}
        terms["parties"] = {name: {"width": 8, "bottom": bottom} for name in ("bank", "shop")}
        terms = SessionMessage.parse(json.dumps(record | {"terms": terms})).terms
        shape = tuple(own.inputs.shape[1:])
        try:
            check_consent(terms, own.name, CONSENT, own.split, row_shape=shape)
        except SpecError as error:  # what is refused so is refused whatever its options are
            if "cannot be counted" in error.what:
                raise AssertionError("a member of the package cannot be counted") from error
            raise
        frame_limits(terms, own.name, own.split)
        link, _ = local_pair()
        party = FeatureParty(own, terms, link, Own(Secret.of_simulation(0, "bank")))
        if terms.secure == "none":
            party.start()
            party.begin(next(rules.schedule(terms, own.split)))
        built.append(case)

    assert hammer(cases, one) > cases / 4
    assert len(built) > cases / 20


@pytest.mark.parametrize("cases", CASES)
def test_introductions_and_reports(terms, data, cases):
    about = Introduction.of(data["bank"], terms, "0" * 32).model_dump()
    hello = json.loads(bytes(Hello("0" * 32, "7", "t" * 43, about).frame().payload))
    report = PartyReport(party="bank", weights_sha256="0" * 64, seconds=1.0).model_dump()

    def one(case):
        if case % 4:
            text = mutated_json(hello, 1, case).encode(errors="replace")
            Introduction.parse(dict(Hello.of(Frame(Kind.HELLO, payload=text)).about))
        else:
            text = mutated_json(report, 2, case).encode(errors="replace")
            PartyReport.of(Frame(Kind.DONE, payload=text), "bank")

    assert hammer(cases, one) > cases / 3
