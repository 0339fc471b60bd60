"""The file of a party of `vfl llm`."""

import pytest

from vfl.config.toml import check
from vfl.core.errors import ConfigError
from vfl.llm.file import LlmFile, LlmTerms
from vfl.llm.parties import Talk
from vfl.session.ranges import schema_ranges


@pytest.mark.parametrize("schema", [Talk, LlmTerms])
def test_every_number_that_a_peer_says_is_bounded(schema):
    assert schema_ranges(schema)


def test_all_mistakes_of_a_file_are_told_at_once():
    shape = {"vocabulary": 9, "wings": 2}
    terms = {"project": "0" * 32, "shape": shape, "shown_bytes": 5, "mode": "slow"}
    for content, said in (
        ({"terms": terms}, {"terms.mode = slow"}),
        ({"terms": terms | {"mode": "fast"}}, {"shape is no", "first_bytes = 4 is less"}),
        ({"terms": terms | {"mode": "thesis", "protect": "scores"}}, {'needs mode = "fast"'}),
        ({"terms": terms | {"mode": "fast", "protect": "scores", "score_bits": 9}},
         {"score_bits = 9 is more than integer_bits = 8; set integer_bits = 9"}),
        ({"terms": terms | {"shown_bytes": 3, "mode": "fast", "shape": {"vocabulary": 9}}},
         {"no 'owner'", "no 'dealer'"}),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            check({"party": "user", **content}, LlmFile, "llm.toml")
        assert all(text in str(caught.value) for text in said)
