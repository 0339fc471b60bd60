"""The file of a party of `vfl llm`."""

import pytest
from pydantic import TypeAdapter, ValidationError

from vfl.config.llm_file import Address
from vfl.config.party_file import Node


@pytest.mark.parametrize("port", ["65536", "99999"])
def test_a_port_that_no_machine_has_is_refused(port):
    with pytest.raises(ValidationError, match="at most 65535"):
        TypeAdapter(Address).validate_python(f"owner.example:{port}")
    with pytest.raises(ValidationError, match="at most 65535"):
        Node(ranks_at=f"10.0.0.1:{port}")


def test_the_last_port_and_no_address_are_fine():
    assert TypeAdapter(Address).validate_python("[::1]:65535")
    assert Node(ranks_at="").ranks_at == ""
