"""Every setting of a configuration, set to another value: it changes something, or is refused."""

import typing

from promise import BrokenPromiseError
from pydantic import BaseModel

from vfl.core.errors import VFLError


class SettingsWalk:
    """Tests of one kind of configuration; its file has a fixture `result`.

    `result(base, *settings)` gives what is done by a configuration with these settings, as a text,
    and remembers it; `result.__wrapped__` does it again.

    Attributes:
        models: first parts of the models' setting paths, and the models.
        bases: configurations from which cases start.
        cases: rows of a setting, its other value, the bases it is set in, and settings beside it,
            which have a "="; without a base that of the first part of its name.
        elsewhere: settings and sections whose difference does not show here, and why.
    """

    models: typing.ClassVar
    bases: typing.ClassVar
    cases: typing.ClassVar
    elsewhere: typing.ClassVar = {}

    def pytest_generate_tests(self, metafunc):
        if "base" in metafunc.fixturenames:
            metafunc.parametrize("base", self.bases)
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", [*self._each()], ids=_name_of)

    def _each(self):
        for setting, value, *more in self.cases:
            beside = [one for one in more if "=" in one]
            for base in [one for one in more if "=" not in one] or [setting.partition(".")[0]]:
                yield setting, value, base, *beside

    def test_every_setting_has_a_case_or_a_reason(self):
        tried = {name for name, *_ in self.cases}
        known = {name.replace("parties.bank.", "parties.") for name in tried} | {*self.elsewhere}
        listed = {name for prefix, model in self.models for name in of(model, prefix)}
        # Of a list, each setting of an entry has a case of the whole list.
        assert not {
            name for name in listed if name not in known and name.split(".")[0] not in known
        }

    def test_it_does_the_same_again(self, base, result):
        """A difference below is of the setting."""
        assert result.__wrapped__(base) == result(base)

    def test_a_setting_changes_something_or_is_refused(self, case, result):
        """No setting is ever ignored."""
        setting, value, base, *beside = case
        before = result(base, *beside)
        try:
            after = result(base, *beside, f"{setting}={value}")
        except VFLError:
            return
        if after == before:
            raise BrokenPromiseError(f"{setting} = {value} changed nothing, and was not refused")


def _name_of(case):
    setting, _, base, *beside = case
    return "-".join([setting, base, *beside[:1]]).replace("=", "_")


def of(model, prefix=""):
    """Every setting's path; of parties and tasks without their names."""
    for name, field in model.model_fields.items():
        inner = next(_models_in(field.annotation), None)
        if inner is None:
            yield prefix + name
        else:
            yield from of(inner, f"{prefix}{name}.")


def _models_in(annotation):
    """The tables of settings in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models_in(inner)
