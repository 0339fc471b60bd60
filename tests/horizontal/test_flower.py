"""The same training through Flower's apps: messages, state and the mod, without its processes."""

import json
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from horizontal_party import CLASSES, PRIVATE, one_round, refusal, write_party

from vfl.config import PartyFile, to_toml
from vfl.core.errors import ConsentError, PeerFailedError, ProtocolError, UserError
from vfl.core.seeds import Secret
from vfl.horizontal import Averager, NoisePlan, plan_noise, simulate
from vfl.horizontal.client import build_model
from vfl.horizontal.settings import HorizontalSettings, HorizontalStudy
from vfl.horizontal.simulation import Evaluator, shared_rows
from vfl.horizontal.study import simulate_on_ray

with warnings.catch_warnings():  # importing typer, as flwr does, uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from vfl.horizontal.flower import (
        HorizontalStrategy,
        NoiseMod,
        arrays_of,
        layers_in,
        simulated_client_app,
    )
    from vfl.horizontal.party import add_rounds, check_terms

pytestmark = pytest.mark.usefixtures("within_a_run")
KINDS = {
    "adp_fl": {},
    "steps": {"noise": "steps", "clip": "quantile", "sensitivity": "rigorous"},
    "server": {"noise": "server", "clip": "quantile", "sensitivity": "rigorous"},
    "layers": {"layers": 0.5},
}


@dataclass
class StandInGrid:
    """Carries messages to ClientApps by calls; each node has a state of its own."""

    app: ClientApp
    count: int
    sent: list = field(default_factory=list)
    replies: list = field(default_factory=list)

    def __post_init__(self):
        self.contexts = {
            node: Context(1, node, {}, RecordDict(), {}) for node in range(100, 100 + self.count)
        }

    def send_and_receive(self, messages, *, timeout=None):
        answers = []
        for message in messages:
            self.sent.append(message)
            node = message.metadata.dst_node_id
            answers.append(self.app(message, self.contexts[node]))
        self.replies += answers
        return answers[::-1]  # in no order of the clients


def through_flower(asked, app):
    data = shared_rows(asked)
    model = build_model(asked, tuple(data.inputs.shape[1:]), data.outputs)
    secret = Secret.of_simulation(asked.seed, "horizontal server")
    averager = Averager(asked, plan_noise(asked, data.fewest), model, secret)
    evaluator = Evaluator(asked, averager, model, data.inputs[data.test], data.labels[data.test])
    grid = StandInGrid(app, asked.clients)
    HorizontalStrategy(averager, evaluator, "run", sorted(grid.contexts)).run(grid, 1.0)
    return evaluator.outcome(), grid


@pytest.mark.parametrize("kind", KINDS)
def test_flower_ends_in_the_weights_of_one_process(kind):
    asked = HorizontalSettings(**PRIVATE | KINDS[kind])
    found, grid = through_flower(asked, simulated_client_app())
    same = simulate(asked)
    assert all(torch.equal(found.layers[number], same.layers[number]) for number in same.layers)
    assert found.tests == same.tests
    figures = [dict(one.content.metric_records["figures"]) for one in grid.replies]
    assert {name for one in figures for name in one} == {"within"}


def test_the_mod_is_what_adds_the_noise():
    asked = HorizontalSettings(**PRIVATE)
    app = simulated_client_app()
    _, grid = through_flower(asked, app)
    message, context = grid.sent[0], Context(1, 100, {}, RecordDict(), {})
    kept = []

    def without(given, own):
        reply = app(given, own)
        reply.content["figures"] = MetricRecord({"within": 0, "moved": 1.0, "deviation": 2.0})
        kept.append(reply.content.array_records["update"]["0"].numpy().copy())
        return reply

    # a fixed secret: 512 fresh numbers are beyond the interval once in a thousand draws
    mod = NoiseMod(lambda terms: Secret.of_simulation(0, "client"))
    reply = mod(message, context, without)
    noise = reply.content.array_records["update"]["0"].numpy() - kept[0]
    assert noise.std() == pytest.approx(2.0, rel=0.1)


@pytest.mark.skipif(not find_spec("ray"), reason="the simulation extra is not installed")
@pytest.mark.net
def test_ray_ends_in_the_weights_of_one_process(tmp_path):
    """In a process of its own, for this one has loaded Flower with its telemetry on."""
    asked = HorizontalSettings(**PRIVATE | {"clients": 50, "sampled": 10})
    (tmp_path / "study.toml").write_text(to_toml(HorizontalStudy(horizontal=asked)))
    command = [sys.executable, "-m", "vfl", "horizontal", "study.toml", "--engine", "ray", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["weights_sha256"] == simulate(asked).record()["weights_sha256"]


@pytest.mark.skipif(not find_spec("ray"), reason="the simulation extra is not installed")
def test_a_flower_with_telemetry_on_plays_nobody(monkeypatch):
    monkeypatch.setattr("flwr.supercore.telemetry.FLWR_TELEMETRY_ENABLED", "1")
    with pytest.raises(UserError, match="telemetry"):
        simulate_on_ray(HorizontalSettings(**PRIVATE))


# --- a party of its own -------------------------------------------------------------------------


def test_a_party_trains_on_its_own_rows_and_counts_its_rounds(tmp_path, asked):
    party = write_party(tmp_path)
    for number in (1, 2, 3):
        _, reply = one_round(party, asked, number)
        assert set(reply.content.array_records["update"]) == {"0", "1"}
    assert "rounds of this training are used up" in refusal(party, asked)
    kept = list((party.store_path / "sessions" / "horizontal").glob("*.json"))
    assert [one.stat().st_mode & 0o777 for one in kept] == [0o600]


def test_no_two_answers_of_a_party_have_the_same_noise(tmp_path, asked):
    party = write_party(tmp_path)
    first, again = (
        one_round(party, asked)[1].content.array_records["update"]["0"].numpy() for _ in "ab"
    )
    assert not np.allclose(first, again, atol=1e-3)


@pytest.mark.parametrize(
    ("consent", "changed", "told"),
    [
        ("max_epsilon = 1", {}, "does not consent to spend more"),
        ("max_epsilon = 1", {"noise": "none", "epsilon": None}, "a record has no epsilon"),
        ("max_batch_size = 8", {}, "batch_size 16"),
        ("", {"learning_rate": 11.0}, "horizontal.learning_rate 11.0"),
        ("ranges.horizontal.rounds = [1, 1]", {}, "horizontal.rounds "),
        ("max_epochs = 1", {"local_steps": 100}, "passes over the rows"),
        ("max_parameters = 10", {}, "parameters <= 10"),
    ],
)
def test_a_party_refuses_what_it_does_not_consent_to(tmp_path, asked, consent, changed, told):
    party = write_party(tmp_path, consent)
    changed = HorizontalSettings(**asked.model_dump() | changed)
    assert told in refusal(party, changed)


def test_a_server_that_draws_clients_in_secret_may_draw_one_in_every_round(tmp_path, asked):
    party = write_party(tmp_path, "max_epochs = 8")
    changed = {"noise": "server", "clients": 6, "sampled": 1, "rounds": 30}
    terms = SimpleNamespace(
        settings=HorizontalSettings(**asked.model_dump() | changed), layers={}, run="run"
    )
    with pytest.raises(ConsentError, match="16 passes over the rows"):
        check_terms(party, terms, torch.zeros(60, 4))


def test_a_party_that_never_heard_of_it_refuses(tmp_path, asked):
    party = write_party(tmp_path)
    content = party.model_dump(mode="json", exclude_none=True) | {"consent": {}}
    silent = PartyFile.model_validate(content)
    silent._path = party._path
    assert "mode horizontal" in refusal(silent, asked)


def test_a_name_is_bound_to_its_settings(tmp_path, asked):
    party = write_party(tmp_path)
    one_round(party, asked)
    weaker = asked.model_copy(update={"epsilon": 800.0})
    assert "bound to other settings" in refusal(party, weaker)
    assert "not a valid name of a run" in refusal(party, asked, run="../up")


def test_what_a_party_tells_of_its_own_files_is_that_they_failed(tmp_path, asked, capsys):
    party = write_party(tmp_path)
    fewer = asked.model_copy(update={"classes": CLASSES[:5]})
    told = refusal(party, fewer)
    assert "party 'north' cannot use its own files" in told
    assert "5 of 10 classes unknown" in capsys.readouterr().out


def test_another_network_than_that_of_its_columns_is_refused(tmp_path, asked):
    party = write_party(tmp_path)
    app = ClientApp()
    add_rounds(app, lambda context: party)
    model = build_model(asked, (9,), 10)
    averager = Averager(asked, NoisePlan(), model, Secret.fresh())
    strategy = HorizontalStrategy(
        averager, Evaluator(asked, averager, model, None, None), "run", [1]
    )
    (message,) = strategy.configure_train(1, arrays_of(averager.layers), ConfigRecord(), None)
    reply = app(message, Context(1, 1, {}, RecordDict(), {}))
    with pytest.raises(PeerFailedError, match="does not fit this party's columns"):
        strategy.aggregate_train(1, [reply])


def npy(array, **header):
    """A .npy file whose header says something else than what is behind it."""
    stream = BytesIO()
    told = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape} | header
    np.lib.format.write_array_header_1_0(stream, told)
    return stream.getvalue() + array.tobytes()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("0", npy(np.zeros(4, np.float32), shape=(10**15,))),
        ("0", npy(np.zeros(4, np.float64))),
        ("0", npy(np.zeros((2, 2), np.float32))),
        ("0", b"no such file"),
        ("first", npy(np.zeros(4, np.float32))),
    ],
    ids=["too large", "other numbers", "not flat", "no file", "no number"],
)
def test_layers_of_another_form_are_refused_before_they_take_memory(name, content):
    array = SimpleNamespace(data=content)
    with pytest.raises(ProtocolError):
        layers_in({name: array})
    good = SimpleNamespace(data=npy(np.arange(4, dtype=np.float32)))
    assert layers_in({"0": good})[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("content", [{}, {"terms": ConfigRecord({"run": "r", "round": 1})}])
def test_a_message_of_something_else_is_answered_with_a_refusal(tmp_path, content):
    app = ClientApp()
    add_rounds(app, lambda context: write_party(tmp_path))
    message = Message(RecordDict(content), dst_node_id=1, message_type="train.horizontal")
    reply = app(message, Context(1, 1, {}, RecordDict(), {}))
    assert "not belong to a horizontal training" in str(reply.content["failure"]["what"])
