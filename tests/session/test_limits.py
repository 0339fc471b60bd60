"""Largest frames from the terms: honest ones fit, one byte more is refused unread."""

import socket
import threading
import time
import tracemalloc

import numpy as np
import pytest
import torch
from frame_targets import SPECS

from vfl.compression import INFERENCE, StepContext, make
from vfl.config import read_experiment, with_overrides
from vfl.core.errors import OversizedFrameError
from vfl.core.frame import LIMIT_BYTES, Frame, Kind, pack_header
from vfl.core.seeds import Secret
from vfl.experiments.plan import of_experiment
from vfl.mpc.secure.shared_layer import LayerAxes
from vfl.session import Terms, rules
from vfl.session.consent import frame_limits, most_rows
from vfl.session.schedule import QUERY_ROWS
from vfl.training.run import load_data
from vfl.transport import Admission, Credential, Hello, TcpHub, TcpLink, Timeouts
from vfl.transport.stream import Stream

WIDTHS = (12, pytest.param(32, marks=pytest.mark.slow), 256)
FAST = Timeouts(handshake_s=5, step_s=5, idle_s=5, rejoin_window_s=0.3, retry_s=0.02)


def terms_of(experiment, codec, width, mode="train"):
    changes = [f"codec={codec}", f"parties.bank.width={width}"]
    return Terms.of(with_overrides(experiment, changes), mode, "trial-1")


def test_rows_are_those_of_the_largest_exchange(terms, data):
    split = data["bank"].split
    assert most_rows(terms, split) == {Kind.CUT: 50, Kind.QUERY: 40}
    assert most_rows(terms, None) == {Kind.CUT: 50, Kind.QUERY: QUERY_ROWS}
    assert most_rows(terms.model_copy(update={"mode": "predict"}), split)[Kind.CUT] == 0
    largest = terms.train.model_copy(update={"batch_size": 1_000_000})
    assert most_rows(terms.model_copy(update={"train": largest}), split)[Kind.CUT] == 140


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("codec", SPECS)
def test_real_frames_fit_and_one_byte_more_is_refused(experiment, data, codec, width):
    terms, split = terms_of(experiment, codec, width), data["bank"].split
    limits, rows = frame_limits(terms, "bank", split), most_rows(terms, split)
    places, secret = np.arange(rows[Kind.CUT]), Secret.of_simulation(0, "bank")
    ours, at = make(codec), StepContext(0, training=True, secret=secret, rows=places)
    ours.check(width)
    shape = (rows[Kind.CUT], ours.wire_width(width))
    cut = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    sent = ours.encode(cut, at)
    saved = ours.decode(sent.payload, *shape, StepContext(0, training=True, rows=places)).saved
    real = {
        (Kind.CUT, "up"): sent.payload,
        (Kind.QUERY, "up"): ours.encode(cut[: rows[Kind.QUERY]], INFERENCE).payload,
        (Kind.GRAD, "down"): ours.encode_grad(cut, saved, at),
    }
    for (kind, way), payload in real.items():
        most = getattr(limits, way)[kind]
        assert len(payload) <= most <= 4 * shape[0] * width * 2 + 4096
        for size, taken in ((len(payload), True), (most, True), (most + 1, False)):
            assert passes(getattr(limits, way), Frame(kind, 0, bytes(size))) is taken
    for kind in (Kind.HELLO, Kind.PROTOCOL, Kind.OPENING, Kind.QUERY_OPENING):
        assert not passes(limits.up, Frame(kind, 0, b"x"))


def passes(limits, frame):
    """Whether a stream takes a frame under these limits."""
    ours, theirs = socket.socketpair()
    stream = Stream(ours, limits)
    try:
        theirs.sendall(pack_header(frame))
        sender = threading.Thread(target=theirs.sendall, args=(frame.payload,))
        if len(frame.payload) <= limits.get(frame.kind, 0):
            sender.start()
            stream.read(time.monotonic() + 5)
            sender.join(5)
            return True
        with pytest.raises(OversizedFrameError):
            stream.read(time.monotonic() + 5)
        return False
    finally:
        stream.end()
        theirs.close()


def test_shared_layers_open_nothing_before_their_columns_are_told(experiment, data):
    content = experiment.model_dump(exclude_none=True)
    content |= {"merge": "sum", "secure": "beaver", "codec": "none"}
    own = {"width": 8, "bottom": "mlp:hidden=none"}
    content["parties"] = {"bank": own, "shop": own}
    terms = Terms.of(type(experiment).model_validate(content), "train", "trial-1")
    split = data["bank"].split
    early = frame_limits(terms, "bank", split)
    assert Kind.OPENING not in early.up
    assert Kind.CUT not in early.up
    axes = LayerAxes(columns=33, width=8, other=33)
    limits = frame_limits(terms, "bank", split, {"bank": axes})
    bytes_ = limits.up[Kind.OPENING] + limits.up[Kind.CUT]
    bytes_ += limits.down[Kind.OPENING] + limits.down[Kind.GRAD]
    assert bytes_ + 4 * 16 == axes.wire_bytes(50, trains=True)


@pytest.fixture
def bounded(terms, data):
    """A hub and a party's link, both under the limits of the terms."""
    limits = frame_limits(terms, "bank", data["bank"].split)
    credentials = {"bank": Credential("7", "t" * 43)}
    admission = Admission("session-1", credentials, limits=lambda _: limits)
    hub = TcpHub("127.0.0.1", 0, admission, timeouts=FAST, window=4)
    hello = Hello("session-1", "7", "t" * 43)
    link = TcpLink.connect("127.0.0.1", hub.port, hello, None, FAST, limits=limits)
    hub.wait_all(["bank"], 5)
    yield hub.link("bank"), link, limits
    link.close()
    hub.close()


def test_a_party_that_sends_more_is_refused_before_memory_is_taken(bounded):
    label, link, limits = bounded
    oversized = Frame(Kind.CUT, 0, bytes(limits.up[Kind.CUT] + 1))
    with pytest.raises(OversizedFrameError, match="larger than agreed"):
        link.send(oversized)
    header = bytearray(pack_header(Frame(Kind.CUT)))
    header[:4] = LIMIT_BYTES.to_bytes(4, "little")  # what any party could claim before
    link._stream._socket.send(header)
    tracemalloc.start()
    try:
        with pytest.raises(OversizedFrameError, match="announces more"):
            label.receive()
        assert tracemalloc.get_traced_memory()[1] < 256 * 1024
    finally:
        tracemalloc.stop()


def test_gradients_above_the_limit_do_not_leave_and_are_not_kept(bounded):
    label, _, limits = bounded
    with pytest.raises(OversizedFrameError):
        label.send(Frame(Kind.GRAD, 0, bytes(limits.down[Kind.GRAD] + 1)))
    assert label.held_bytes == 0


def test_what_is_held_for_a_party_is_bounded_and_counted(bounded):
    label, link, limits = bounded
    most = limits.held_bytes(4)
    for step in range(9):
        label.send(Frame(Kind.GRAD, step, bytes(limits.down[Kind.GRAD])))
    assert label.held_bytes == limits.resend_bytes(4)
    for step in range(4):
        link.send(Frame(Kind.CUT, step, bytes(limits.up[Kind.CUT])))
    label.receive()
    assert label.held_bytes <= most


def test_unread_frames_of_a_stream_have_a_limit_together():
    ours, theirs = socket.socketpair()
    stream = Stream(ours, {Kind.CUT: 100})
    stream.inbox_limit_bytes = 2 * 116
    stream.window = 8
    try:
        for step in range(3):
            theirs.sendall(pack_header(Frame(Kind.CUT, step, bytes(100))) + bytes(100))
        large = Frame(Kind.GRAD, 0, bytes(8 * 1024 * 1024))
        with pytest.raises(OversizedFrameError, match="unread frames"):
            stream.write(large, time.monotonic() + 5)
        assert stream.inbox_bytes == 3 * 116
    finally:
        stream.end()
        theirs.close()


def test_a_plan_names_what_the_label_party_holds_at_most(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[data]\nsource = "breast_cancer"\n[parties.bank]\nwidth = 16384\n')
    experiment = read_experiment(path)
    terms = Terms.of(experiment, "train", "run")
    limits = frame_limits(terms, "bank", load_data(experiment)["bank"].split)
    promised = of_experiment(path)["held_bytes_per_party"]
    assert promised == limits.held_bytes(rules.window_frames(terms))
