"""The page of a plan in a real browser: GPT-2's train step is looked through. `make test-browser` gets a
browser.
"""

import shutil
from itertools import pairwise

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.gpt2 import program

webdriver = pytest.importorskip(
    "selenium.webdriver", reason="selenium is not installed: pip install shardax[browser]"
)
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
pytestmark = [pytest.mark.mixed_dtypes, pytest.mark.filterwarnings("ignore::ResourceWarning")]


def start():
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if not (binary and driver):
        pytest.skip("no Chromium with its chromedriver on PATH: `make test-browser` gets them")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1440,900",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


@pytest.fixture(scope="module")
def browser():
    found = start()
    yield found
    found.quit()


@pytest.fixture(scope="module")
def plan():
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    step, args = program(mesh, size="tiny", batch=8, seq=16)
    return step.plan(*args)


@pytest.fixture
def page(plan, browser, tmp_path):
    """The page, freshly loaded; nothing went wrong in it at the end, and nothing was fetched."""
    plan.to_html(tmp_path / "plan.html")
    browser.get(f"file://{tmp_path}/plan.html")
    yield browser
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def table(page, title: str):
    return page.find_element(By.XPATH, f"//section[h2[starts-with(., '{title}')]]//table")


def cells(found, column: int) -> list[str]:
    return _of_column(found, column, "textContent")


def values(found, column: int) -> list[float]:
    return list(map(float, _of_column(found, column, "dataset.value")))


def _of_column(found, column: int, what: str) -> list[str]:
    script = f"return [...arguments[0].tBodies[0].rows].map((row) => row.cells[{column - 1}].{what})"
    return found.parent.execute_script(script, found)


def click(page, element) -> None:
    page.execute_script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element)
    element.click()


def visible(page, selector: str):
    shown = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.getClientRects().length)"
    return page.execute_script(shown, selector)


def choose(page, text: str) -> None:
    click(page, page.find_element(By.XPATH, f"//button[.='{text}']"))


def test_what_it_says_first(page, plan):
    assert page.title == page.find_element(By.TAG_NAME, "h1").text == "Plan of train_step on data=2, model=4"
    assert [b.text for b in visible(page, ".tiles b")][0] == "8"
    assert len(cells(table(page, "Collectives"), 1)) > 20
    for title in ("Arguments and results", "Alive at the peak", "Saved for the backward pass", "Estimate"):
        assert table(page, title)


def test_a_click_on_a_head_sorts(page):
    found = table(page, "Collectives")
    total = found.find_elements(By.TAG_NAME, "th")[5]
    assert total.text == "per call"
    dearest_first = values(found, 6)
    assert dearest_first == sorted(dearest_first, reverse=True)
    click(page, total)
    assert total.get_attribute("aria-sort") == "descending" and values(found, 6) == dearest_first
    click(page, total)
    assert total.get_attribute("aria-sort") == "ascending" and values(found, 6) == dearest_first[::-1]
    click(page, found.find_elements(By.TAG_NAME, "th")[0])
    assert cells(found, 1) == sorted(cells(found, 1)) and len(set(cells(found, 1))) > 2


def test_search_hides_the_other_rows(page):
    search = page.find_element(By.ID, "search")
    search.send_keys("reduce_scatter model")
    rows = [row.text for row in visible(page, "tbody tr")]
    assert rows and all("reduce_scatter" in row and "model" in row for row in rows)
    assert page.find_element(By.ID, "matches").text == f"{len(rows)} rows"
    search.clear()
    search.send_keys("no such thing")
    assert not visible(page, "section")


def test_a_reason_opens_to_its_facts(page):
    page.find_element(By.ID, "search").send_keys(
        "dot_general in"
    )  # what a product wants otherwise than it was made
    facts = ((reason, reason.find_element(By.TAG_NAME, "div")) for reason in visible(page, "details.because"))
    reason, fact = next(
        (reason, fact) for reason, fact in facts if " against " in fact.get_attribute("textContent")
    )
    assert not fact.is_displayed()
    click(page, reason.find_element(By.TAG_NAME, "summary"))
    assert fact.is_displayed() and " against " in fact.text


def test_a_line_leads_to_its_place_in_the_program(page):
    """Even where the search has hidden it."""
    page.find_element(By.ID, "search").send_keys("all_reduce gpt2.py sum of dot_general")
    link = next(a for a in visible(page, "td a") if "gpt2.py" in a.text)
    number = link.text.rpartition(":")[2]
    click(page, link)
    (row,) = visible(page, ".code tr:target")
    assert row.find_elements(By.TAG_NAME, "td")[0].text == number
    assert "all_reduce over" in row.text
    top, height = page.execute_script("return [arguments[0].getBoundingClientRect().top, innerHeight]", row)
    assert 0 <= top < height


def test_how_an_uneven_array_lies(page):
    """257 rows over 4: blocks of 65, the last of 62, each on the two devices along `data`."""
    page.find_element(By.ID, "search").send_keys("embed.attend")
    button = next(
        b for b in visible(page, "button.array") if b.text.endswith("f32[8,16,257] P('data', None, 'model')")
    )
    click(page, button)
    facts = page.find_element(By.ID, "array-facts").text
    assert "8 blocks of [4, 16, 65], 16,640 bytes each; uneven: hatched is padding." in facts
    blocks = page.find_elements(By.CSS_SELECTOR, "#blocks .block")
    assert [len(block.find_elements(By.TAG_NAME, "i")) for block in blocks] == [0, 0, 0, 1] * 2
    hatched = blocks[3].find_element(By.TAG_NAME, "i")
    assert hatched.size["width"] / blocks[3].size["width"] == pytest.approx(3 / 65, abs=0.03)
    click(page, blocks[7])
    words = page.find_element(By.ID, "block-facts").text
    assert words == "Block 1, 0, 3 holds [4:8, :, 195:257], and 192 elements of padding. Devices 7."


def test_replicated_groups_have_one_color(page):
    choose(page, "state/params/layer_0/mlp/up/kernel")
    assert page.find_element(By.ID, "array-name").text == "argument state/params/layer_0/mlp/up/kernel"
    assert (
        "4 blocks of [32, 32], 4,096 bytes each, each on 2 devices."
        in page.find_element(By.ID, "array-facts").text
    )
    devices = page.find_elements(By.CSS_SELECTOR, "#mesh .block")
    colors = [device.value_of_css_property("background-color") for device in devices]
    assert [device.text for device in devices] == list(map(str, range(8)))
    assert colors[:4] == colors[4:] and len(set(colors)) == 4
    click(page, devices[6])
    assert [d.text for d in devices if "chosen" in d.get_attribute("class")] == ["2", "6"]
    assert (
        page.find_element(By.ID, "block-facts").text
        == "Block 0, 2 holds [:, 64:96]. Devices 2, 6 (2 copies)."
    )
    assert (
        "in_shardings[0].params['layer_0']['mlp']['up']['kernel'] says so"
        in page.find_element(By.ID, "why").text
    )


def test_blocks_of_nested_splits(page, tmp_path):
    """257 rows, over 2 and over 2 x 4: padded once, to 8 blocks of 33, of which the first axis has 4 each:
    132 and 125 rows.
    """
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def program(x):
        y = sx.annotate(jnp.sin(x), P("data"))
        return sx.annotate(y * 2, P(("data", "model")))

    sx.shard_jit(program, mesh=mesh).plan(jnp.ones((257, 8))).to_html(tmp_path / "nested.html")
    page.get(f"file://{tmp_path}/nested.html")
    click(page, next(b for b in visible(page, "button.array") if b.text.endswith("f32[257,8] P('data')")))
    assert (
        "2 blocks of [132, 8], 4,224 bytes each, each on 4 devices; uneven"
        in page.find_element(By.ID, "array-facts").text
    )
    blocks = page.find_elements(By.CSS_SELECTOR, "#blocks .block")
    hatched = blocks[1].find_element(By.TAG_NAME, "i")
    assert hatched.size["width"] / blocks[1].size["width"] == pytest.approx(7 / 132, abs=0.03)
    click(page, blocks[1])
    assert page.find_element(By.ID, "block-facts").text.startswith(
        "Block 1, 0 holds [132:257, :], and 56 elements of padding."
    )


@pytest.mark.parametrize("width", [1440, 1000, 500])
def test_nothing_overlaps_or_leaves_the_window(page, width):
    """The picture is beside the ledgers where there is room, else above them."""
    page.set_window_size(width, 900)
    choose(page, "state/params/layer_0/mlp/up/kernel")
    inner, scrolled = page.execute_script("return [innerWidth, document.documentElement.scrollWidth]")
    assert scrolled <= inner
    boxes = [e.rect for e in visible(page, "#array-name, #array-facts, #blocks, #block-facts, #mesh, #why")]
    assert all(above["y"] + above["height"] <= below["y"] + 1 for above, below in pairwise(boxes))
    panel, ledgers = (page.find_element(By.ID, name).rect for name in ("panel", "ledgers"))
    beside = panel["x"] >= ledgers["x"] + ledgers["width"]
    above = panel["y"] + panel["height"] <= ledgers["y"] + 1
    assert (beside, above) == (width > 1000, width <= 1000)
    page.set_window_size(1440, 900)
