"""A party's own file narrows every number of a horizontal training."""

import pytest

from vfl.config import Consent
from vfl.horizontal.settings import HorizontalSettings
from vfl.session.ranges import numbers_of, out_of_products_range, schema_ranges

SETTINGS = HorizontalSettings(epsilon=1.0, classes=("a", "b"), rows=9)
NUMBERS = dict(numbers_of(SETTINGS, "horizontal"))
BY_NAME = {f"horizontal.{name}" for name in HorizontalSettings.limited_by}


def beyond(settings, consent):
    specs = {"bottom": [settings.model]}
    return list(out_of_products_range(settings, "horizontal", consent, specs))


def test_every_number_is_looked_at():
    assert NUMBERS.keys() == schema_ranges(HorizontalSettings, "horizontal").keys()


@pytest.mark.parametrize("name", sorted(NUMBERS.keys() - BY_NAME))
def test_a_party_narrows_every_number(name):
    value = NUMBERS[name]
    assert beyond(SETTINGS, Consent(ranges={name: (value, value)})) == []
    for ends in ((value + 1, value + 2), (value - 2, value - 1)):
        ((asked, allowed),) = beyond(SETTINGS, Consent(ranges={name: ends}))
        assert asked == f"{name} {value}"
        assert allowed == f"{name} from {ends[0]:g} to {ends[1]:g}"


def test_a_party_narrows_an_option_of_the_network():
    deep = SETTINGS.model_copy(update={"model": "mlp:dropout=0.5"})
    narrow = Consent(ranges={"bottom.mlp.dropout": (0, 0.1)})
    assert [asked for asked, _ in beyond(deep, narrow)] == ["bottom.mlp.dropout 0.5"]
