"""Every setting of a party's file, set to another value: the party does otherwise, or refuses."""

import hashlib
import json
from functools import cache
from shutil import rmtree

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from settings_walked import SettingsWalk

from vfl.clients.feature_party import FeatureParty
from vfl.config import Experiment, PartyFile, read_party_file
from vfl.config.toml import override
from vfl.core.errors import VFLError
from vfl.core.frame import Frame, Kind
from vfl.core.seeds import Secret
from vfl.datasets import Split
from vfl.datasets.augment import augmentation_of
from vfl.federation.bundle import check_bundle
from vfl.federation.deployment import supernode_command
from vfl.session import Terms, check_consent, check_dealers_consent
from vfl.session.consent import check_explained, check_middles_consent, check_tasks_consent
from vfl.session.exchange import Own
from vfl.session.ranks.machines import RanksKey
from vfl.session.ranks.processes import device_of
from vfl.session.serving import Requests, RowRate
from vfl.session.store.identity import Identity, keys_of
from vfl.session.store.party_folder import own_data, own_folder, own_ledger
from vfl.session.store.session_ledger import Meter
from vfl.session.threads import use_threads
from vfl.session.trace import expected_bytes as trace_bytes
from vfl.session.trace import own_recorders
from vfl.transport import local_pair

#: The feature party "bank" beside "shop"; the label party "clinic"; and a dealer.
BANK = {"party": "bank", "data": {"source": "bank.csv", "id": "key", "columns": ["a*", "d"]}}
CLINIC = {"party": "clinic", "data": {"source": "clinic.csv", "id": "key", "label": "y"}}
BANK_ON_DISK = {"party": "bank", "data": {"source": "bank.parquet", "id": "key"}}
DEALER = {"party": "bank", "role": "dealer"}
BASES = {"bank": BANK, "clinic": CLINIC, "parquet": BANK_ON_DISK, "dealer": DEALER}
#: Settings whose difference needs several processes, and where it is tested.
ELSEWHERE = {
    "data.tokenizer": "needs a model: tests/datasets/test_encode.py, TokenEncoder",
    "data.repeats": "no id of these tables repeats: tests/datasets/test_tables_as_they_are.py",
    "data.length": "tokens of data.tokenizer: tests/datasets/test_encode.py",
    "consent.min_common": "an alignment: tests/datasets/test_alignment_protocols.py",
    "consent.min_ids": "an alignment: tests/datasets/test_alignment_protocols.py",
    "consent.max_alignments": "alignments of a day: tests/promises/test_dictionary.py",
    "consent.max_id_ratio": "alignments of a day: tests/promises/test_dictionary.py",
    "consent.reuse_alignment_keys": "an alignment: tests/server/test_alignment_session.py",
    "node.rank_host": "ranks at the label party: tests/server/test_stream_training.py",
    "monitor": "an endpoint of its own: tests/federation/test_monitor.py",
    "serve": "a service of its own: tests/promises/test_listeners.py and tests/serving",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("party")
    draw = np.random.default_rng(0)
    table = pd.DataFrame(draw.normal(size=(60, 3)).round(1), columns=["a0", "a1", "a2"])
    table["d"] = pd.date_range("2020-01-01", periods=60).strftime("%d.%m.%Y").to_numpy()
    table.insert(0, "key", np.arange(60))
    table.insert(1, "other", draw.permutation(60))
    table.to_csv(folder / "bank.csv", index=False)
    table.to_parquet(folder / "bank.parquet", index=False)
    table.assign(a0=table["a0"] ** 2).to_csv(folder / "other.csv", index=False)
    labels = {"key": table["key"], "y": draw.integers(0, 2, 60), "z": draw.integers(0, 3, 60)}
    pd.DataFrame(labels).to_csv(folder / "clinic.csv", index=False)
    for name in ("ca.pem", "node.key", "key.pem"):
        (folder / name).write_text(name)
    (folder / "ranks.key").write_text("ab" * 32)
    (folder / "ranks.key").chmod(0o600)
    own, peer = Identity.fresh(), Identity.fresh()
    own.keep_at(folder / "identity.key")
    peer.public.keep_at(folder / "peers" / "shop.pub")
    return folder


def terms(mode="train", **changes):
    """The terms of a session that "bank" is asked to take part in."""
    content = {
        "name": "run",
        "parties": {"bank": {"width": 4, "bottom": "mlp:hidden=8"}, "shop": {"width": 4}},
        "label": {"party": "clinic"},
        "train": {"epochs": 2, "batch_size": 8, "optimizer": "sgd"},
    }
    return Terms.of(Experiment.model_validate(content | changes), mode, "run")


def outcome(attempt, *arguments):
    try:
        return attempt(*arguments)
    except VFLError as error:
        return type(error).__name__, error.what, error.want


def asked(party):
    """What a party says to sessions that each ask for something."""
    sum_of_two = {"merge": "sum", "secure": "sum"}
    dp = {"dp": {"noise": 0.5}, "data": {"validation": 0.0}}
    token = {"data": {"alignment": "a", "missing_rows": "token"}}
    several = {"tasks": [{"party": "insurer", "column": "z"}]}
    middle = {"middle": {"party": "hub"}}
    compiled = {"train": {"epochs": 2, "batch_size": 8, "compile": True}}
    sessions = [{}, {"codec": "topk:k=2"}, {"defense": "layer_norm"}, sum_of_two, dp, token]
    again = {"train": {"epochs": 2, "batch_size": 8, "warm_start": "january"}}
    sessions += [several, middle, compiled, again]
    trees = {"model": "trees", "parties": {"shop": {}}, "train": {"epochs": 2}}
    explained = terms("predict", **trees).asked_with(["explain=shop"])
    split = Split(np.arange(40), np.arange(40, 50), np.arange(50, 60))

    def answer(change):
        agreed, consent = terms(**change), party.consent
        check_consent(agreed, "bank", consent, split, row_shape=(4,))
        return "takes part"

    others = [
        lambda: check_dealers_consent(terms(), "bank", party.consent),
        lambda: check_middles_consent(terms(**middle), "hub", party.consent, split),
        lambda: check_tasks_consent(terms(**several), "insurer", party.consent, split, 2),
        lambda: check_bundle(b"", party.consent.bundles),
        lambda: check_explained(explained, party.consent),
    ]
    return [outcome(answer, change) for change in sessions] + list(map(outcome, others))


def served(party):
    """How requests for rows are answered, three times the same ones and once many."""
    rate = RowRate(party.consent.max_rows_per_second, clock=lambda: 0.0)
    requests = Requests(np.arange(3000), party.consent, Meter(), rate)
    rows = [np.arange(3), np.arange(3), *np.split(np.arange(3000), 3)]
    frames = [Frame(Kind.ASK, 0, one.astype("<u4").tobytes()) for one in rows]
    return [str(type(requests.admit(one))) for one in frames]


def rows_of(party, mode):
    data = own_data(party, terms(mode), "classification")
    digest = hashlib.sha256(data.ids_digest)
    for own in (data.inputs, data.labels):
        digest.update(b"" if own is None else np.ascontiguousarray(own.numpy()).tobytes())
    at = str(type(data.inputs))
    return digest.hexdigest(), data.rows, data.classes, at


def bottom_of(party, data):
    own = Own(Secret.of_simulation(0, "bank"))
    feature = FeatureParty(data, terms(), local_pair()[0], own, bottom=party.bottom)
    return {name: list(one.shape) for name, one in feature.end.state_dict().items()}


def spent_under(party):
    """How a session with an epsilon, and one without, begin."""

    def begun(number, defense):
        agreed = terms(defense=defense).model_copy(update={"run": f"run{number}"})
        with own_ledger(party).session(agreed) as (_, meter, _):
            meter.trained = lambda: np.arange(40 - number, dtype=np.uint64)
            meter.show(20)
            return "begins"

    defenses = ("none", "clipped_noise:norm=1,sigma=4")
    return [outcome(begun, number, defense) for number, defense in enumerate(defenses)]


def does(file):
    """All that a party does by its file, as far as one process sees it."""
    party = read_party_file(file)
    found = {"asked": asked(party), "served": served(party), "trained": None}
    data = None
    if party.role == "data":
        data = outcome(lambda: own_data(party, terms(), "classification"))
        found["trained"] = outcome(lambda: rows_of(party, "train"))
    if hasattr(data, "rows"):
        own_folder(party, terms()).save(data, terms(), {"w": torch.zeros(1)})
        found["predicted"] = outcome(lambda: rows_of(party, "predict"))
        about = terms(), "bank", data.split, {"w": torch.zeros(1)}
        found["traced"] = outcome(trace_bytes, party.trace, *about)
        found["records"] = outcome(lambda: len(own_recorders(party, terms(), data, None)))
        if party.party == "bank":
            found["bottom"] = outcome(lambda: bottom_of(party, data))
    found["keys"] = outcome(lambda: keys_of(party))
    found["node"] = outcome(lambda: supernode_command(party, file)[:-2])
    found["ranks"] = party.ranks, party.ranks_address
    if party.ranks_address:
        found["ranks' key"] = outcome(lambda: RanksKey.of(party).secret.hex())
    found["augment"] = str(augmentation_of(party.augment, (4,), own=True))
    found["device"] = device_of(party.device, 1)
    found["threads"] = use_threads(party.threads)
    torch.set_num_threads(1)
    folder = own_folder(party, terms()).path
    found["kept"] = str(folder.relative_to(file.parent))
    found["spends"] = outcome(lambda: spent_under(party))
    return json.dumps(found, default=str, sort_keys=True)


@pytest.fixture(scope="module")
def result(place):
    """All that a party does by a file."""

    @cache
    def of(base, *settings):
        content = json.loads(json.dumps(BASES[base]))
        override(content, settings)
        for store in ("store", "elsewhere"):
            rmtree(place / store, ignore_errors=True)
        file = place / "party.toml"
        file.write_text(tomli_w.dumps(content))
        return does(file)

    return of


class TestPartySettings(SettingsWalk):
    models = (("", PartyFile),)
    bases = BASES
    elsewhere = ELSEWHERE
    cases = (
        ("party", "other", "bank"),
        ("role", "dealer", "bank"),
        ("store", "elsewhere", "bank"),
        ("bottom", "mlp:hidden=9", "bank", "dealer"),
        ("augment", "noise:sigma=0.1", "bank", "dealer"),
        ("device", "meta", "bank"),
        ("threads", "2", "bank"),
        ("data.source", "other.csv", "bank"),
        ("data.id", "other", "bank"),
        ("data.predict", "other.csv", "bank"),
        ("data.query", "SELECT 1", "bank"),
        ("data.query", "SELECT key, a0 FROM 'bank.csv'", "bank", "data.source=duckdb:"),
        ("data.predict_query", "SELECT 1", "bank"),
        ("data.columns", "['a0']", "bank"),
        ("data.label", "d", "bank"),
        ("data.label", "z", "clinic"),
        ("data.shape", "[1, 1, 3]", "bank", "data.columns=['a*']"),
        ("data.separator", ";", "bank", "parquet"),
        ("data.encoding", "utf-16", "bank", "parquet"),
        ("data.decimal", ",", "bank", "parquet"),
        ("data.dates", "{d='%d.%m.%Y'}", "bank"),
        ("data.skip_lines", "1", "bank", "parquet"),
        ("data.missing", "['0.1']", "bank"),
        ("data.missing", "{d=['01.01.2020']}", "parquet"),
        ("data.numbers", "{d=','}", "bank", "parquet"),
        ("data.id_type", "number", "bank"),
        ("data.bins", "4", "bank"),
        ("data.memory", "64MiB", "bank"),
        ("consent.codecs", "['none']", "bank"),
        ("consent.defenses", "['none']", "bank"),
        ("consent.secure", "['sum']", "bank"),
        ("consent.models", "['trees']", "bank"),
        ("consent.ranges", "{'train.batch_size'=[1, 2]}", "bank"),
        ("consent.ranges", "{'train.momentum'=[0.0, 0.1]}", "bank"),
        ("consent.min_parties", "3", "bank"),
        ("consent.parties", "['insurer']", "bank"),
        ("consent.members", "['nobody']", "bank"),
        ("consent.purposes", "['credit risk*']", "bank"),
        ("consent.modes", "['predict']", "bank"),
        ("consent.max_width", "3", "bank"),
        ("consent.max_epochs", "1", "bank"),
        ("consent.max_bytes", "10", "bank"),
        ("consent.max_parameters", "10", "bank"),
        ("consent.max_memory_bytes", "10", "bank"),
        ("consent.max_parties", "1", "bank"),
        ("consent.max_batch_size", "2", "bank"),
        ("consent.max_rows", "10", "bank"),
        ("consent.explains", "['shop']", "bank"),
        ("consent.missing_rows", "['token', 'intersection']", "bank"),
        ("consent.max_rows_per_second", "1.0", "bank"),
        ("consent.max_queries", "1", "bank"),
        ("consent.max_epsilon", "1.0", "bank"),
        ("consent.max_statistics", "10", "bank"),
        ("consent.min_changed_rows", "1", "bank"),
        ("consent.min_dp_noise", "1.0", "bank"),
        ("consent.max_dp_epsilon", "1.0", "bank"),
        ("consent.compile", "true", "bank"),
        ("consent.label_parties", "['insurer']", "bank"),
        ("consent.middle", "['hub']", "bank"),
        ("consent.warm_starts", "['february*']", "bank"),
        ("consent.versions", "['0.0.1']", "bank"),
        ("consent.bundles", "[]", "bank"),
        ("trace.phases", "train", "bank", "dealer"),
        ("trace.epochs", "1", "bank"),
        ("trace.epochs", "1", "bank", "trace.phases=train"),
        ("trace.snapshots", "1", "bank"),
        ("serve.port", "8081", "bank", "dealer"),
        ("node.superlink", "elsewhere:8000", "bank"),
        ("node.ca", "key.pem", "bank"),
        ("node.key", "ca.pem", "bank"),
        ("node.api_port", "9095", "bank"),
        ("node.ranks", "2", "bank"),
        ("node.ranks_at", "127.0.0.1:9999", "bank"),
        ("node.ranks_key", "nothing.key", "bank"),
        ("node.ranks_key", "nothing.key", "bank", "node.ranks_at=127.0.0.1:9999"),
        ("identity.key", "nothing.key", "bank"),
        ("identity.peers", "nobody", "bank"),
    )
