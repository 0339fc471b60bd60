import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Literal

import pytest

from vfl.core import registry
from vfl.core.errors import (
    BadOptionError,
    SpecError,
    TakenNameError,
    UnknownNameError,
    UnknownOptionError,
)
from vfl.core.registry import Registry, parse

OUTSIDE = "tests_of_another_package"


class Shape:
    """The contract of this test's family."""


class Square(Shape):
    def __init__(
        self,
        side: int,
        scale: float = 1.0,
        filled: bool = False,
        colour: Literal["red", "blue"] = "red",
        note: str = "",
        turns: int | None = None,
    ):
        self.options = (side, scale, filled, colour, note, turns)


class Dot(Shape):
    pass


class Stranger:
    pass


@pytest.fixture
def shapes():
    family = Registry("shape", Shape, {"none": "nowhere:Never"}, group="vfl.no_such_group")
    family.register("square", Square)
    family.register("dot", Dot)
    return family


@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [
        ("none", "none", {}),
        (" topk : k = 3 , values=8 ", "topk", {"k": "3", "values": "8"}),
        ("topk:k=3,", "topk", {"k": "3"}),
        ("a:text=b=c", "a", {"text": "b=c"}),
    ],
)
def test_parse(spec, name, options):
    assert parse(spec) == (name, options)


@pytest.mark.parametrize("spec", ["", " ", ":k=3", "topk:k", "topk:=3", "topk:k=", "a:k=1,k=2"])
def test_texts_that_are_no_spec(spec):
    with pytest.raises(SpecError, match="a spec"):
        parse(spec)


def test_options_become_what_the_constructor_says(shapes):
    made = shapes.make("square:side=3,scale=2,filled=yes,colour=blue,note=7,turns=4")
    assert made.options == (3, 2.0, True, "blue", "7", 4)
    assert [type(option) for option in made.options] == [int, float, bool, str, str, int]
    assert shapes.make("square:side=1").options == (1, 1.0, False, "red", "", None)


@pytest.mark.parametrize("word", ["true", "YES", "on", "false", "No", "off"])
def test_words_for_yes_and_no(shapes, word):
    filled = shapes.make(f"square:side=1,filled={word}").options[2]
    assert filled is (word.lower() in ("true", "yes", "on"))


@pytest.mark.parametrize(
    ("options", "what", "want"),
    [
        ("side=x", "not a whole number", "a whole number"),
        ("side=1.5", "not a whole number", "a whole number"),
        ("side=1,scale=big", "not a number", "a number"),
        ("side=1,filled=maybe", "neither yes nor no", "true or false"),
        ("side=1,colour=green", "no such choice", "red, blue"),
        ("side=1,turns=x", "not a whole number", "a whole number"),
    ],
)
def test_values_of_another_type(shapes, options, what, want):
    with pytest.raises(BadOptionError, match=what) as caught:
        shapes.make(f"square:{options}")
    key, _, value = options.split(",")[-1].partition("=")
    assert caught.value.where == f"shape 'square', option '{key}'"
    assert (caught.value.got, caught.value.want) == (value, want)


def test_an_unknown_name_comes_with_the_nearest(shapes):
    with pytest.raises(UnknownNameError, match="no shape is called 'sqare'") as caught:
        shapes.make("sqare:side=3")
    assert (caught.value.want, caught.value.fix) == ("dot, none, square", "did you mean 'square'?")


def test_an_unknown_option_comes_with_the_nearest(shapes):
    with pytest.raises(UnknownOptionError, match="shape 'square' has no option 'scal'") as caught:
        shapes.make("square:side=1,scal=2")
    assert caught.value.fix == "did you mean 'scale'?"
    with pytest.raises(UnknownOptionError) as caught:
        shapes.make("dot:side=1")
    assert caught.value.want == "no options"


def test_an_option_without_default_must_be_given(shapes):
    with pytest.raises(BadOptionError, match="shape 'square' needs side") as caught:
        shapes.make("square:scale=2")
    assert caught.value.fix == "square:side=..."


def test_a_published_name_makes_the_same_member():
    family = Registry("shape", Shape, {}, "vfl.no_such_group", {"quadrat": "square"})
    family.register("square", Square)
    assert family.make("quadrat:side=2").options[0] == 2
    assert family.names() == ["square"]


def test_a_class_that_does_not_meet_the_contract(shapes):
    shapes.register("stranger", Stranger)
    with pytest.raises(SpecError, match="does not derive from Shape") as caught:
        shapes.make("stranger")
    assert caught.value.got.endswith(".Stranger")


@pytest.fixture
def outside(monkeypatch):
    """A family that finds two entry points of another package."""
    module = ModuleType(OUTSIDE)
    module.Circle = type("Circle", (Shape,), {})
    module.Stranger = Stranger
    monkeypatch.setitem(sys.modules, OUTSIDE, module)
    entries = [
        EntryPoint("circle", f"{OUTSIDE}:Circle", "vfl.shapes"),
        EntryPoint("stranger", f"{OUTSIDE}:Stranger", "vfl.shapes"),
        EntryPoint("dot", f"{OUTSIDE}:Circle", "vfl.shapes"),
    ]
    asked = []
    monkeypatch.setattr(registry, "entry_points", lambda group: asked.append(group) or entries)
    family = Registry("shape", Shape, {"dot": f"{__name__}:Dot"}, group="vfl.shapes")
    family.register("dot", Dot)
    return family, asked


def test_entry_points_are_members(outside):
    family, asked = outside
    assert family.names() == ["circle", "dot", "stranger"]
    assert type(family.make("circle")).__name__ == "Circle"
    assert asked == ["vfl.shapes"]


def test_an_entry_point_cannot_replace_a_member(outside):
    with pytest.raises(TakenNameError, match="two members have the shape name 'dot'") as caught:
        outside[0].make("dot")
    assert caught.value.got == f"{OUTSIDE}:Circle"
    assert caught.value.want.endswith(f"is {__name__}:Dot")


@pytest.mark.parametrize("name", ["none", "square", "quadrat"])
def test_a_registered_class_cannot_replace_a_member(name):
    family = Registry(
        "shape", Shape, {"none": "nowhere:Never"}, "vfl.no_such_group", {"quadrat": "square"}
    )
    family.register("square", Square)
    with pytest.raises(TakenNameError) as caught:
        family.register(name, Dot)
    assert caught.value.got == f"{__name__}:Dot"
    assert type(family.make("square:side=1")) is Square


def test_a_class_whose_module_is_loaded_anew_takes_its_own_place():
    family = Registry("shape", Shape, {}, "vfl.no_such_group")
    again = type("Dot", (Shape,), {"__module__": Dot.__module__, "__qualname__": Dot.__qualname__})
    family.register("dot", Dot)
    family.register("dot", again)
    assert type(family.make("dot")) is again


def test_a_package_may_name_a_class_where_it_is_not_written(monkeypatch):
    module = ModuleType(OUTSIDE)
    module.Circle = Dot
    monkeypatch.setitem(sys.modules, OUTSIDE, module)
    entries = [EntryPoint("dot", f"{OUTSIDE}:Circle", "vfl.shapes")] * 2
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    family = Registry("shape", Shape, {}, group="vfl.shapes")
    family.register("dot", Dot)
    assert type(family.make("dot")) is Dot


def test_an_entry_point_must_meet_the_contract(outside):
    with pytest.raises(SpecError, match="does not derive"):
        outside[0].make("stranger")


class Sized(Shape):
    def __init__(self, learning_rate: float = 1.0, rate: int = 0) -> None:
        self.given = learning_rate


class Timed(Shape):
    def __init__(self, rate: int = 0) -> None:
        self.given = rate


def test_an_option_under_its_former_name_is_accepted_with_a_warning():
    members = {"sized": f"{__name__}:Sized", "timed": f"{__name__}:Timed"}
    former = {"rate": "learning_rate", "lr": "learning_rate"}
    family = Registry("shape", Shape, members, group="vfl.shapes", former_options=former)
    with pytest.warns(FutureWarning, match="'lr' of a shape is called 'learning_rate' now"):
        assert family.make("sized:lr=0.5").given == 0.5
    assert family.make("sized:rate=3").given == 1.0
    assert family.make("timed:rate=3").given == 3
    with pytest.raises(UnknownOptionError):
        family.make("timed:lr=3")
