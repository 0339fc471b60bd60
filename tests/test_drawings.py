"""The diagrams of the documentation are drawn from their texts."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "draw_design.py"
FOLDER = ROOT / "docs" / "drawings"


@pytest.fixture(scope="module")
def draw():
    spec = importlib.util.spec_from_file_location("draw_design", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.draw


def test_images_are_those_of_their_texts():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("source", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_every_word_of_a_text_is_on_its_image(source, draw):
    image = ElementTree.fromstring(draw(source.read_text()))
    shown = " ".join(each.text for each in image.iter("{http://www.w3.org/2000/svg}text"))
    wanted = re.sub(r"-->|<--|\|", " ", source.read_text()).split()
    assert sorted(shown.split()) == sorted(wanted)


def test_boxes_grow_with_their_text_and_nothing_of_it_is_markup(draw):
    short, long = (draw(f"T\na | b\n{'<b> & ' * count}|\n") for count in (1, 40))
    heights = [float(re.search(r'class="step".*?height="(\d+)"', one)[1]) for one in (short, long)]
    assert heights[0] < heights[1]
    ElementTree.fromstring(long)


def test_a_text_without_two_lanes_is_refused(draw):
    with pytest.raises(ValueError, match="two lanes"):
        draw("T\na\nb |\n")
