"""Pages in a real browser: nothing fails, tables sort and filter, and words can be read."""

import pytest
from browser import BROWSER, Browser

from vfl.config import Experiment
from vfl.experiments import GridFolder
from vfl.experiments.attack_grid import grid_cells
from vfl.experiments.pages import build_report
from vfl.experiments.scheduler import run_cells

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed here")

EXPERIMENT = {
    "name": "attacked",
    "data": {"rows": 400},
    "parties": {"client": {"width": 8, "bottom": "mlp:hidden=16"}},
    "label": {"top": "linear"},
    "train": {"epochs": 2, "learning_rate": 0.02},
    "grid": {
        "defenses": ["layer_norm", "label_free"],
        "attacks": ["nearest_mean", "kmeans:starts=1", "logistic:at=bottom"],
        "baselines": ["scratch", "raw"],
        "leaks": [1, 3],
        "draws": 1,
        "seeds": [0, 1],
        "pictures": 20,
    },
}
#: Words whose colour is too near to the one behind them (WCAG 2.1: 4.5, large ones 3).
FAINT = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = text => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = element => {
    let layers = [];
    for (let one = element; one; one = one.parentElement) {
      const found = rgba(getComputedStyle(one).backgroundColor);
      if (found[3]) layers.push(found);
      if (found[3] === 255) break;
    }
    return layers.reverse().reduce((under, over) =>
      over.slice(0, 3).map((c, i) => c * over[3] / 255 + under[i] * (1 - over[3] / 255)),
      [255, 255, 255]);
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(one => one.nodeType === 3 && one.textContent.trim());
    const style = getComputedStyle(element);
    if (!own || !element.getClientRects().length || element.closest("script, style")) continue;
    const colour = element.closest("svg") ? style.fill : style.color;
    const under = behind(element.closest("svg")?.parentElement ?? element);
    const [x, y] = [light(rgba(colour)), light(under)];
    const ratio = (Math.max(x, y) + .05) / (Math.min(x, y) + .05);
    const inside = element.closest("svg") && element.classList.contains("inside");
    const least = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
    const words = element.textContent.trim().slice(0, 30);
    if (ratio < least && !inside) found.push(`${words} ${ratio.toFixed(2)}`);
  }
  return found.join("; ");
})()
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    shown = Browser(folder / "profile")
    for domain in ("Runtime", "Log"):
        shown.call(f"{domain}.enable")
    experiment = Experiment.model_validate(EXPERIMENT)
    grid = GridFolder(folder / "grid")
    grid.write(experiment, grid_cells(experiment), "vfl grid attacked.toml")
    assert run_cells(grid, grid.cells()) == []
    shown.call("Page.navigate", url=build_report(grid.path).as_uri())
    shown.wait_for("document.readyState == 'complete' && !!document.querySelector('th button')")
    yield shown
    shown.close()


def column(page, place):
    return page.value(
        "[...document.querySelector('table.sortable').tBodies[0].rows]"
        f".map(row => row.cells[{place}].textContent.trim()).join('|')"
    ).split("|")


def test_a_heading_sorts_its_column_both_ways(page):
    press = "document.querySelectorAll('table.sortable th button')[2].click()"
    heading = "document.querySelectorAll('table.sortable th')[2].getAttribute('aria-sort')"
    page.value(press)
    up = [float(one.split()[0]) for one in column(page, 2)]
    assert up == sorted(up)
    assert page.value(heading) == "ascending"
    page.value(press)
    assert [float(one.split()[0]) for one in column(page, 2)] == up[::-1]
    assert page.value(heading) == "descending"


def test_the_leaderboard_shows_what_an_attacker_of_one_kind_reaches(page):
    """Each kind has what those before it in the list have; the list is used by keyboard too."""
    shown = "[...document.querySelectorAll('.choices > *')].map(one => one.checkVisibility())"
    kinds = "[...document.querySelector('label select').options].map(one => one.text)"
    assert page.value(kinds) == ["everybody who attacked", "cuts alone", "with a bottom"]
    assert page.value(shown) == [True, False, False]
    choose = (
        "list = document.querySelector('label select'); list.selectedIndex = {};"
        " list.dispatchEvent(new Event('change'))"
    )
    page.value(choose.format(1))
    assert page.value(shown) == [False, True, False]
    words = page.value("document.querySelectorAll('.choices > *')[1].textContent")
    assert "logistic:at=bottom" not in words
    assert "label_free" in words
    page.value(choose.format(0))
    assert page.value(shown) == [True, False, False]


def test_only_rows_with_the_words_are_left(page):
    page.value(
        "const field = document.querySelector('input[type=search]'); field.value = 'layer_norm';"
        " field.dispatchEvent(new Event('input'))"
    )
    left = page.value(
        "[...field.nextElementSibling.tBodies[0].rows].filter(row => !row.hidden)"
        ".map(row => row.textContent).join('|')"
    ).split("|")
    assert left
    assert all("layer_norm" in row for row in left)


def test_a_point_under_the_mouse_says_what_it_is(page):
    """A browser shows the title of what lies uppermost there, or of the next around it."""
    said = page.value("""
        [...document.querySelectorAll("svg[role=img] circle")].filter(dot => {
          const at = (dot.scrollIntoView({block: "center"}), dot.getBoundingClientRect());
          const top = document.elementFromPoint(at.x + at.width / 2, at.y + at.height / 2);
          return top && top.querySelector(":scope > title") && top.tagName === "circle";
        }).map(dot => dot.querySelector("title")?.textContent ?? "").join("|")
    """).split("|")
    assert any(one.startswith("layer_norm") for one in said)


@pytest.mark.parametrize(
    ("media", "scheme", "width"),
    [("screen", "light", 1280), ("screen", "dark", 1280), ("screen", "light", 400),
     ("print", "light", 1001)],  # A4, landscape
)  # fmt: skip
def test_it_fits_and_can_be_read(page, media, scheme, width):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.call("Emulation.setEmulatedMedia", media=media, features=features)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.call("Emulation.setDeviceMetricsOverride", **size)
    assert page.value(FAINT) == ""
    assert page.value("document.documentElement.scrollWidth") <= width
    leading = "[...document.querySelectorAll('.choices > :not([hidden])')]"
    if width > 1000:  # the columns that matter are the last ones
        assert page.value(f"{leading}.every(one => one.scrollWidth <= one.clientWidth)")
    assert page.errors == []
