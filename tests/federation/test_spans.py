"""Spans of sessions reach the owner's collector, join across parties, and carry no secret."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from vfl.config import Experiment, read_party_file
from vfl.core.errors import ConfigError, ConsentError
from vfl.core.frame import Frame, Kind
from vfl.federation.spans import traced
from vfl.session import Terms
from vfl.session.store.party_folder import own_ledger

EXPERIMENT = {"parties": {"bank": {}, "shop": {}}}


@pytest.fixture
def collector():
    """A collector on the loopback: its URL, and the spans that it has received."""
    spans = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            told = ExportTraceServiceRequest()
            told.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
            spans.extend(
                span
                for resource in told.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *told):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    server.shutdown()
    server.server_close()


def party(folder, name, url, consent=""):
    folder.mkdir()
    file = folder / "party.toml"
    file.write_text(
        f'party = "{name}"\n[data]\nsource = "x.csv"\nid = "id"\n{consent}'
        f'[monitor]\nport = 0\nspans = "{url}"\n'
    )
    return read_party_file(file)


def facts(span):
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


def train(found, terms):
    with own_ledger(found).session(terms) as (_, meter, _):
        meter(found.party, "up", Frame(Kind.CUT, payload=bytes(984)))
        meter.rows, meter.passes = 50, 6


def test_each_session_becomes_a_span_in_a_trace_of_all_its_parties(tmp_path, collector):
    url, spans = collector
    terms = Terms.of(Experiment.model_validate(EXPERIMENT), "train", "loans")
    found = [party(tmp_path / name, name, url) for name in ("bank", "shop")]
    train(found[0], Terms.of(Experiment.model_validate(EXPERIMENT), "train", "earlier"))
    for each in found:
        with traced(each, each.monitor.spans):
            train(each, terms)
    assert [facts(span)["vfl.party"] for span in spans] == ["bank", "shop"]
    assert {span.trace_id for span in spans} == {spans[0].trace_id}
    assert len({span.span_id for span in spans}) == 2
    one = facts(spans[0])
    assert (one["vfl.run"], one["vfl.rows"], one["vfl.bytes_up"]) == ("loans", 50, 1000)
    assert spans[0].name == "vfl train"
    assert spans[0].status.code == spans[0].status.STATUS_CODE_OK
    assert spans[0].end_time_unix_nano >= spans[0].start_time_unix_nano > 0
    nonces = [entry.nonce for each in found for entry in own_ledger(each).entries()]
    assert not any(nonce in str(spans) for nonce in nonces)


def test_a_refusal_is_a_span_with_its_code(tmp_path, collector):
    url, spans = collector
    found = party(tmp_path / "bank", "bank", url, "[consent]\nmax_epochs = 1\n")
    terms = Terms.of(Experiment.model_validate(EXPERIMENT), "train", "loans")
    with (
        traced(found, found.monitor.spans),
        pytest.raises(ConsentError),
        own_ledger(found).refusing(terms),
    ):
        raise ConsentError("too many epochs")
    (span,) = spans
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert span.status.message == "V403: too many epochs"


def test_an_absent_collector_stops_nothing(tmp_path):
    found = party(tmp_path / "bank", "bank", "http://127.0.0.1:9/v1/traces")
    with traced(found, found.monitor.spans):
        train(found, Terms.of(Experiment.model_validate(EXPERIMENT), "train", "loans"))


@pytest.mark.parametrize(
    "url",
    ["http://10.0.0.1:4318/v1/traces", "ftp://127.0.0.1/", "https://me:secret@host/", "127.0.0.1"],
)
def test_spans_leave_this_machine_only_over_tls_and_without_a_password(tmp_path, url):
    with pytest.raises(ConfigError) as refused:
        party(tmp_path / "bank", "bank", url)
    assert "secret" not in str(refused.value)
