"""Metrics of a party: true, for those alone who may read them, and nothing of its data."""

import json
import re
import ssl
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vfl.cli.federation import _monitored
from vfl.config import Experiment, MonitorSettings, read_party_file
from vfl.core.errors import UserError
from vfl.core.frame import Frame, Kind
from vfl.core.storage import locked, write_json
from vfl.federation import doctor
from vfl.federation.monitor import Monitor, PartyMetrics, monitored
from vfl.serving import service
from vfl.session import Terms
from vfl.session.store.party_folder import own_ledger
from vfl.transport import write_trial_certificates

ROOT = Path(__file__).parents[2]
EXPERIMENT = {"parties": {"bank": {}, "shop": {}}, "defense": "clipped_noise:norm=1,sigma=4"}


@pytest.fixture
def party(tmp_path):
    """A party that has trained twice, and may spend an epsilon of 32."""
    file = tmp_path / "party.toml"
    file.write_text(
        'party = "bank"\n[data]\nsource = "x.csv"\nid = "id"\n[consent]\nmax_epsilon = 32\n'
        "[monitor]\nport = 0\n"
    )
    found = read_party_file(file)
    for name, passes in (("loans", 6), ("cards", 9)):
        terms = Terms.of(Experiment.model_validate(EXPERIMENT), "train", name)
        with own_ledger(found).session(terms) as (_, meter, _):
            meter("bank", "up", Frame(Kind.CUT, payload=bytes(984)))
            meter.rows, meter.passes = 50, passes
    own_ledger(found).end("loans", "a" * 64)
    return found


def read(metrics):
    text = generate_latest(metrics).decode()
    return {
        (each.name, *sorted(each.labels.values())): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def get(address, context=None):
    try:
        with urllib.request.urlopen(address, timeout=10, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


def test_metrics_are_those_of_the_ledger_the_certificates_and_the_disk(party, tmp_path):
    write_trial_certificates(tmp_path / "certificates", ["127.0.0.1"], ())
    files = {"ca.pem": tmp_path / "certificates/ca.pem", "none.pem": tmp_path / "none.pem"}
    told = read(PartyMetrics(party, files, lambda: True))
    assert told["vfl_node_up",] == 1
    assert told["vfl_sessions_total", "train"] == 2
    assert told["vfl_session_rows_total", "train"] == 100
    assert told["vfl_session_bytes_total", "train", "up"] == 2000
    assert (told["vfl_runs", "ended"], told["vfl_runs", "open"]) == (1, 1)
    entries = own_ledger(party).entries()
    spent = entries[0].epsilon * (6 + 9)
    assert told["vfl_epsilon_spent",] == pytest.approx(spent)
    assert told["vfl_epsilon_left",] == pytest.approx(32 - spent)
    last = doctor.certificate("ca", files["ca.pem"]).found.rpartition("until ")[2]
    days = (datetime.fromisoformat(last) - datetime.now()).days
    assert abs(told["vfl_certificate_days_left", "ca.pem"] - days) <= 1
    assert ("vfl_certificate_days_left", "none.pem") not in told
    assert 0 < told["vfl_disk_free_bytes",] <= told["vfl_disk_bytes",]
    assert told["vfl_ledger_readable",] == 1
    assert not any(entry.nonce in str(told) for entry in entries)


def test_a_session_at_work_and_how_far_it_is(party):
    newest = own_ledger(party).entries()[-1].run
    metrics = PartyMetrics(party, {}, lambda: False)
    assert read(metrics)["vfl_session_active",] == 0
    run = party.run_path(newest)
    run.mkdir(parents=True)
    write_json(run / "progress.json", {"done": 7, "total": 20, "per_second": 2.5})
    with locked(run):
        told = read(metrics)
    assert told["vfl_session_active",] == 1
    assert told["vfl_session_exchanges_done", newest] == 7
    assert told["vfl_session_exchanges_total", newest] == 20
    assert told["vfl_session_exchanges_per_second", newest] == 2.5
    assert told["vfl_node_up",] == 0


def test_a_damaged_ledger_is_told_and_the_rest_goes_on(party):
    (own_ledger(party).folder / "loans.json").write_text("damaged")
    told = read(PartyMetrics(party, {}, lambda: True))
    assert told["vfl_ledger_readable",] == 0
    assert told["vfl_disk_free_bytes",] > 0


def test_metrics_are_read_here_and_nothing_else_is(party):
    said = []
    with monitored(party, {}, lambda: True, said.append):
        (address,) = [line.removeprefix("metrics at ") for line in said]
        status, text = get(address)
        assert (status, "vfl_epsilon_left" in text) == (200, True)
        assert get(address.replace("/metrics", "/"))[0] == 404
    with pytest.raises(OSError, match="refused"):
        get(address)


def test_without_the_setting_nobody_listens(party, capsys):
    silent = party.model_copy(update={"monitor": None})
    for each, said in ((silent, ""), (party, "metrics at http://127.0.0.1")):
        with _monitored(each, {}, lambda: True):
            assert capsys.readouterr().err[: len(said) or None] == said


def test_only_addresses_of_the_list_may_read(party):
    settings = MonitorSettings(port=0, allow=("10.0.0.0/8",))
    monitor = Monitor(settings, PartyMetrics(party, {}, lambda: True))
    try:
        assert get(monitor.address) == (403, "")
    finally:
        monitor.close()


def test_others_need_tls(party, tmp_path):
    metrics = PartyMetrics(party, {}, lambda: True)
    with pytest.raises(UserError, match="must stay on one machine"):
        Monitor(MonitorSettings(host="0.0.0.0", port=0), metrics)
    with pytest.raises(UserError, match="must be given together"):
        Monitor(MonitorSettings(port=0), metrics, tmp_path / "server.pem")
    folder = tmp_path / "certificates"
    write_trial_certificates(folder, ["127.0.0.1"], ())
    pair = folder / "server.pem", folder / "server.key"
    monitor = Monitor(MonitorSettings(port=0), metrics, *pair)
    try:
        trusting = ssl.create_default_context(cafile=folder / "ca.pem")
        assert get(monitor.address, trusting)[0] == 200
    finally:
        monitor.close()


def emitted(party, tmp_path):
    """Every name that a party or its service can show."""
    write_trial_certificates(tmp_path / "shown", ["127.0.0.1"], ())
    newest = own_ledger(party).entries()[-1].run
    party.run_path(newest).mkdir(parents=True)
    progress = {"done": 7, "total": 20, "per_second": 2.5}
    write_json(party.run_path(newest) / "progress.json", progress)
    own = PartyMetrics(party, {"ca.pem": tmp_path / "shown/ca.pem"}, lambda: True)
    serving = service.Service("lender")
    for name in service._HELP:
        serving.figures.add(name)
    for metrics in (own, serving):
        for family in text_string_to_metric_families(generate_latest(metrics).decode()):
            yield family.name
            yield f"{family.name}_total"
            yield from (each.name for each in family.samples)


def test_the_dashboard_names_metrics_that_exist(party, tmp_path):
    known = set(emitted(party, tmp_path))
    board = json.loads((ROOT / "deploy/grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = {name for expr in asked for name in re.findall(r"\bvfl_\w+", expr)}
    assert len(named) > 20
    assert named <= known, named - known
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(board["panels"]) == len({p["id"] for p in board["panels"]})


def test_the_page_names_every_metric(party, tmp_path):
    page = "".join((ROOT / "docs" / name).read_text() for name in ("monitoring.md", "serving.md"))
    written = set(re.findall(r"\bvfl_\w+", page))
    names = {
        name
        for name in emitted(party, tmp_path)
        if not re.search("_(created|bucket|sum|count)$", name)
    }
    missing = {name for name in names if not {name, name.removesuffix("_total")} & written}
    missing = {name for name in missing if f"{name}_total" not in written}
    assert not missing
    assert written <= {*names, *emitted_prefixes(names)}, written - names


def emitted_prefixes(names):
    """A counter without its ending."""
    return {name.removesuffix("_total") for name in names}


def test_doctor_warns_where_little_epsilon_is_left(party):
    assert doctor.epsilon(party).state == "WARN"
    much = party.model_copy(
        update={"consent": party.consent.model_copy(update={"max_epsilon": 1e6})}
    )
    assert doctor.epsilon(much).state == "OK"
    (own_ledger(party).folder / "loans.json").write_text("damaged")
    assert doctor.epsilon(party).state == "FAIL"
