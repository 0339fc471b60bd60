"""Every code has a page, and every code is raised here by a real mistake, as its page shows it."""

import inspect
import re
import socket
import sys
import warnings
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from vfl import SplitModule, defenses
from vfl.attacks import Grant, Holdings, ThreatModel, View
from vfl.compression import CODECS, Codec, StepContext
from vfl.config import Consent, Experiment, FederationSettings, Locations, read_experiment
from vfl.config.run_folder import RunFolder
from vfl.core import errors
from vfl.core.errors import UnknownNameError, VFLError, codes, page_of, title_of
from vfl.core.frame import Frame, Kind, from_bytes, to_bytes
from vfl.core.seeds import Secret
from vfl.core.storage import FORMAT, write_bytes
from vfl.core.version import VERSION
from vfl.datasets import Dealing, load_bundled
from vfl.federation import deployment
from vfl.federation.project import LabelFolder, write_project
from vfl.mpc import PadStream, private
from vfl.mpc.in_process import LocalParties
from vfl.mpc.many.authenticated import AuthenticatedMember
from vfl.mpc.numbers import FIELD
from vfl.mpc.ring import encode
from vfl.mpc.secure.masks import Ring
from vfl.mpc.shares import SharedTensor, blank
from vfl.privacy import PrivacyStatement, added
from vfl.session import (
    Checkpoints,
    Introduction,
    PartyFolder,
    Terms,
    check_consent,
    check_introduction,
)
from vfl.session.handshake import PartyReport
from vfl.session.ranks.processes import RankProcesses
from vfl.session.store.witness import Witness
from vfl.training.run import load_data
from vfl.training.specs import check_specs, spec_mistakes
from vfl.transport import Credential, Hello, TcpLink, Timeouts
from vfl.transport.handshake import error_frame, read_failure
from vfl.transport.hub import Admission
from vfl.transport.probe import check_clocks

with warnings.catch_warnings():  # importing typer, as Flower does, uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from vfl.server.federation import Federation

CLASSES = {
    member.code: member
    for _, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, VFLError)
}
#: Heads of a family: nothing is raised under their own code.
HEADS = {"V000", "V400", "V450"}

FILE = """\
name = "loans"
codec = "topk:k=2"

[data]
source = "loans.csv"
id = "customer"

[parties.bank]
width = 16
columns = ["income", "mean_*"]

[parties.shop]
width = 16
columns = ["debt"]

[label]
party = "lender"
column = "defaulted"

[train]
epochs = 2
"""


def write(text=FILE, rows=40):
    draw = np.random.default_rng(0).normal(size=(3, rows)).round(3)
    columns = {"income": draw[0], "mean_radius": draw[1], "debt": draw[2]}
    labels = np.where(draw[0] > draw[2], "yes", "no")
    ids = [f"A{number:07}" for number in range(rows)]
    table = pd.DataFrame({"customer": ids, **columns, "defaulted": labels})
    table.to_csv("loans.csv", index=False)
    Path("loans.toml").write_text(text)
    return Path("loans.toml")


def check(old="", new="", rows=40):
    """What `vfl check loans.toml` does, with one text of the file replaced."""
    assert old in FILE
    path = write(FILE.replace(old, new, 1), rows)
    experiment = read_experiment(path, more=spec_mistakes)
    check_specs(experiment, Locations.of(path))
    with Locations.of(path).located(Experiment):
        return experiment, load_data(experiment)


def trained_rows_alone():
    experiment, data = check()
    label = data[experiment.label.party]
    folder, left = PartyFolder(Path("parties") / label.name), label.split.train
    folder.save(label, Terms.of(experiment, "train", "loans-1"), {})
    folder.rows_left(replace(label, ids=label.ids[left], labels=label.labels[left]))


def four_mistakes():
    wrong = FILE.replace("topk:k=2", "randtopp:k=2").replace('column = "defaulted"', "")
    wrong = wrong.replace("[parties.shop]\nwidth = 16", "[parties.shop]\nwidth = 0")
    wrong = wrong.replace("epochs = 2", "epoch = 2").replace('id = "customer"', "test = 1.5")
    read_experiment(write(wrong), more=spec_mistakes)


def terms(**changes):
    parties = {"bank": {"width": 16}, "shop": {"width": 16}}
    content = {"parties": parties, "codec": "randtopk:k=4,alpha=0.1", "label": {"party": "lender"}}
    return Terms.of(Experiment.model_validate(content | changes), "train", "loans-1")


def people():
    return load_bundled("digits", ["bank", "shop"], "lender", Dealing(0, limit=40), flatten=True)


def not_finite():
    bottoms = {"bank": nn.Linear(2, 4)}
    module = SplitModule(bottoms, nn.Linear(4, 2), {"bank": 4})
    module({"bank": torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])})


def no_ray():
    deployment.start_superlink(LabelFolder(Path("label")), simulation=True)


def taken_name():
    CODECS.register("topk", type("Mine", (Codec,), {"__module__": "mine"}))


def named_like_a_folder():
    experiment = Experiment.model_validate({"parties": {"label": {}}, "label": {"party": "lender"}})
    write_project(Path("project"), experiment, {}, "127.0.0.1")


def damaged_checkpoint():
    folder = Path("store/runs/loans-1/parties/bank/checkpoints")
    kept = Checkpoints(folder, "bank", "loans-1", "t" * 64)
    for step in (200, 400):
        kept.save(step, {})
    newest = folder / "0000000400.checkpoint"
    newest.write_bytes(newest.read_bytes()[:-1])
    kept.load(400)


def other_format():
    experiment, _ = check()
    folder = RunFolder.create(Path("loans-1"), experiment, "in-process", "vfl train loans.toml")
    record = folder.path / "run.json"
    text = record.read_text().replace(f'"format": {FORMAT}', '"format": 7')
    record.write_text(re.sub(r'"vfl": "[^"]+"', '"vfl": "9.1.0"', text))
    RunFolder.open(folder.path)


def no_folder_for_files():
    Path("store").write_text("a file where a folder should be")
    write_bytes(Path("store") / "file", b"content")


def ids_of_another_form():
    shop = pd.DataFrame({"customer": range(40), "shoes": range(40)})
    shop.to_csv("shop.csv", index=False)
    own = '[parties.bank]\nsource = "loans.csv"'
    shops = '[parties.shop]\nsource = "shop.csv"'
    path = write(
        FILE.replace("[parties.bank]", own)
        .replace("[parties.shop]", shops)
        .replace('"debt"', '"shoes"')
    )
    load_data(read_experiment(path))


def absent_party():
    grid = SimpleNamespace(get_nodes=lambda: [SimpleNamespace(node_id=7, name="bank")])
    settings = FederationSettings(superlink="lender.example:8000")
    Federation(grid, terms(), settings, people()["lender"], join_timeout_s=0.05).join([])


def store_put_back():
    lender = Witness(Path("lender"), "lender")
    for count in (2075, 3):
        lender.admit("bank", count)


def other_experiment():
    data, ours = people(), terms()
    said = Introduction.of(data["bank"], terms(codec="topk:k=4"), "session")
    check_introduction(said, ours, data["lender"], "session")


def no_consent():
    consent = Consent(codecs=("none",), max_width=8)
    check_consent(terms(), "bank", consent, people()["bank"].split)


def wrong_token():
    door = Admission("session", {"bank": Credential("7", "t" * 32)}, None)
    door.admit(Hello("session", "7", "x" * 32))


def lost_peer():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    patience = Timeouts(rejoin_window_s=0.05, retry_s=0.01)
    TcpLink.connect("127.0.0.1", port, Hello("session", "7", "t" * 32), timeouts=patience)


def peer_failed():
    raise read_failure(error_frame(errors.MissingDataError("no table")), "party 'bank'")


def corrupt():
    raw = bytearray(to_bytes(Frame(Kind.CUT, 3, b"payload")))
    raw[-1] ^= 1
    from_bytes(bytes(raw))


def feature_party_view():
    threat = ThreatModel("feature party", "inference", frozenset({Grant.INPUTS, Grant.BOTTOM}))
    return View(threat, 2, Holdings())


def other_frame_version():
    raw = bytearray(to_bytes(Frame(Kind.CUT, 3, b"payload")))
    raw[4] += 1
    from_bytes(bytes(raw))


def hijacked():
    """A label party whose gradients never look at the rows that came."""
    guard = defenses.make("split_guard:start=0,share=0.5,checks=4")
    secret, same = Secret.of_simulation(0, "bank"), torch.ones(4, 2)
    for step in range(40):
        context = StepContext(step, training=True, secret=secret)
        guard.received(same, same, context)


class Liar(AuthenticatedMember):
    """A holder that adds one to its share."""

    def _sums(self, parts, number, numbers=None):
        return super()._sums([FIELD.add(parts[0], torch.tensor(1)), *parts[1:]], number, numbers)


def cheated():
    make = lambda role, links: (Liar if role == 1 else AuthenticatedMember)(role, links, 2)  # noqa: E731
    values = torch.arange(3)
    with LocalParties(make, 10.0, 3) as parties:
        parties.agree({})

        def program(member):
            (mine,), _ = member.dealt(lambda: [FIELD.lift(values)], [values.shape], "input")
            shared = SharedTensor(blank((2, 3)), 0) if member.deals else mine
            return member.opened(shared)

        parties.run(program)


def killed_rank():
    with RankProcesses("bank", 2, 60.0) as ranks:
        ranks.start(1, {"side": "feature", "party_file": "party.toml"})
        ranks._processes[1].kill()
        ranks.receive(1)


def same_pad_twice():
    pads = PadStream(bytes(32))
    for step in (6, 7, 7):
        pads.elements64(4, "masks", step)


def secure_side_by_side():
    settings = {"parties": {"bank": {}, "shop": {}}, "secure": "sum"}
    check_specs(Experiment.model_validate(settings))


def beyond_the_ring():
    cut = torch.tensor([[0.5, -7.25], [33.0, 1.0]])
    Ring.of(bits=8, fraction=3, parties=2).encode(cut, "bank", 17)


def too_large_to_share():
    encode(torch.tensor([0.5, 1_500_000.0]), 23, "0.weight")


def a_softmax_on_shares():
    private(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Softmax(1)))


def epsilons_of_two_units():
    label = PrivacyStatement("labels", "everybody", 1.0, unit="label", relation="replace")
    outsider = "outsider with the model"
    record = PrivacyStatement(
        "records", outsider, 1.0, unit="record", relation="add or remove", adversary=outsider
    )
    added([label, record])


def clocks_that_differ():
    there = datetime(2026, 11, 29, 10, 40, tzinfo=UTC)
    check_clocks("the SuperLink", "lender.example:8000", there + timedelta(minutes=12), there, 5)


PROVOCATIONS = {
    "V001": named_like_a_folder,
    "V003": four_mistakes,
    "V005": not_finite,
    "V006": no_ray,
    "V007": other_format,
    "V008": no_folder_for_files,
    "V009": damaged_checkpoint,
    "V100": lambda: check("topk:k=2", "topk:2"),
    "V101": lambda: check("topk:k=2", "randtopp:k=2"),
    "V102": lambda: check("topk:k=2", "randtopk:kk=2"),
    "V103": lambda: check("topk:k=2", "topk:k=two"),
    "V104": lambda: check("topk:k=2", "topk:k=40"),
    "V105": a_softmax_on_shares,
    "V106": taken_name,
    "V200": lambda: check('["debt"]', '["debt", "customer"]'),
    "V201": lambda: check('source = "loans.csv"', 'source = "laons.csv"'),
    "V203": lambda: check('"mean_*"', '"mean_radiuss"'),
    "V204": lambda: check('["debt"]', '["debt", "income"]'),
    "V205": lambda: check('"mean_*"', '"defaulted"'),
    "V206": ids_of_another_form,
    "V207": lambda: check(rows=3),
    "V208": too_large_to_share,
    "V209": trained_rows_alone,
    "V300": lambda: feature_party_view().only({Grant.GRADIENTS}),
    "V401": absent_party,
    "V402": other_experiment,
    "V403": no_consent,
    "V404": wrong_token,
    "V405": lost_peer,
    "V406": peer_failed,
    "V407": lambda: PartyReport.of(Frame(Kind.CUT), "bank"),
    "V408": hijacked,
    "V409": cheated,
    "V410": killed_rank,
    "V411": store_put_back,
    "V412": clocks_that_differ,
    "V451": lambda: from_bytes(to_bytes(Frame(Kind.CUT, 3, b"payload"))[:10]),
    "V452": lambda: from_bytes(to_bytes(Frame(Kind.CUT, 3, bytes(9000))), limit_bytes=8192),
    "V453": corrupt,
    "V454": other_frame_version,
    "V501": same_pad_twice,
    "V601": secure_side_by_side,
    "V602": beyond_the_ring,
    "V603": epsilons_of_two_units,
}


@pytest.fixture
def provoke(tmp_path, monkeypatch):
    """Makes a mistake in a folder of its own and gives the error, or fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)

    def raised(code):
        with pytest.raises(VFLError) as caught:
            PROVOCATIONS[code]()
        return caught.value

    return raised


def as_printed(error, folder):
    """An error's text without what differs from day to day."""
    text = str(error).replace(f"{folder}/", "").replace(VERSION, "VERSION")
    text = text.replace(" 0.05 s", " 60 s")  # nobody waits a minute for a test
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:8001", text)
    return re.sub(r"\b[0-9a-f]{8}\.\.\.", "12345678...", text)


def example_of(page):
    (block,) = re.findall(r"^## Example\n\n```\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)
    return block


def test_every_error_has_a_page_and_every_page_an_error():
    assert codes() == sorted(CLASSES)


def test_every_error_is_provoked():
    assert set(PROVOCATIONS) == set(CLASSES) - HEADS


@pytest.mark.parametrize("code", sorted(PROVOCATIONS))
def test_a_mistake_is_told_as_its_page_shows_it(provoke, tmp_path, code):
    error = provoke(code)
    assert type(error) is CLASSES[code]
    told = as_printed(error, tmp_path)
    assert told.startswith(f"error[{code}]: ")
    assert told.endswith(f"\n  more  vfl explain {code}")
    assert not re.search(r"\bA000|Traceback|\b\d\.\d{3}\b", told), "an id or a cell"
    assert told == example_of(page_of(code))


@pytest.mark.parametrize("code", sorted(CLASSES))
def test_a_page_has_its_parts(code):
    title, *rest = page_of(code).split("\n")
    assert re.fullmatch(rf"# {code}: \S.*", title)
    headings = [line for line in rest if line.startswith("#")]
    wanted = ["## How it happens", "## How to mend it"]
    assert headings == wanted if code in HEADS else [*wanted, "## Example"]
    assert len(page_of(code).splitlines()) <= 40


def test_a_code_is_found_however_it_is_written():
    assert page_of(" v104") == page_of("V104")
    assert title_of("V104") in page_of("V104")


def test_an_unknown_code_comes_with_the_nearest():
    with pytest.raises(UnknownNameError) as caught:
        page_of("V1044")
    assert caught.value.fix == "did you mean 'V104'?"
