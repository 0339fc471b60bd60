import inspect
import re

import pytest

from vfl.core import errors
from vfl.core.errors import DisagreementError, PeerError, UserError, VFLError, nearest

CLASSES = [
    member
    for _, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, VFLError)
]
LINE = re.compile(r"^(?P<indent> +)(?P<name>\w+Error) +(?P<code>V\d{3})", re.MULTILINE)


def drawn_tree():
    """Class name -> (parent's name, code) as the docstring of the module draws them."""
    above, tree = {}, {}
    for line in LINE.finditer(errors.__doc__):
        depth = len(line["indent"])
        parents = [above[at] for at in sorted(above) if at < depth]
        tree[line["name"]] = (parents[-1] if parents else "Exception", line["code"])
        above = {at: name for at, name in above.items() if at < depth} | {depth: line["name"]}
    return tree


def test_the_drawing_is_the_tree():
    assert drawn_tree() == {c.__name__: (c.__base__.__name__, c.code) for c in CLASSES}


def test_codes_are_used_once():
    codes = [member.code for member in CLASSES]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("member", CLASSES)
def test_exit_codes_tell_whose_fault_it_was(member):
    wanted = 2 if issubclass(member, UserError) else 3 if issubclass(member, PeerError) else 1
    assert member.exit_code == wanted


def test_a_message_has_its_parts_in_order():
    error = DisagreementError("they differ", where="step 3", got="a", want="b", fix="send a file")
    assert str(error).split("\n") == [
        "error[V402]: they differ",
        "  where step 3",
        "  got   a",
        "  want  b",
        "  try   send a file",
        "  more  vfl explain V402",
    ]


def test_a_record_rebuilds_the_error():
    error = DisagreementError("they differ", where="here", fix="look")
    record = error.record()
    assert record.pop("code") == "V402"
    assert str(DisagreementError(record.pop("what"), **record)) == str(error)


@pytest.mark.parametrize(
    ("slip", "hint"),
    [
        ("randtopp", "did you mean 'randtopk'?"),
        ("noise", "did you mean 'clipped_noise' or 'gradient_noise'?"),  # and not 'none'
        ("zzz", None),
        ("", None),
    ],
)
def test_nearest(slip, hint):
    known = ["none", "topk", "randtopk", "clipped_noise", "gradient_noise"]
    assert nearest(slip, known) == hint
