"""The page of a plan in a real browser: GPT-2's train step is looked through. `make test-browser` gets a
browser.
"""

import re
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
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
pytestmark = [
    pytest.mark.promotes_ranks,
    pytest.mark.browser,
    pytest.mark.mixed_dtypes,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


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
        "--window-size=1400,900",
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
    rows = "[...arguments[0].querySelectorAll('tbody:not(.more) tr')]"
    script = f"return {rows}.map((row) => row.cells[{column - 1}].{what})"
    return found.parent.execute_script(script, found)


def click(page, element) -> None:
    page.execute_script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element)
    element.click()


def visible(page, selector: str):
    shown = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.getClientRects().length)"
    return page.execute_script(shown, selector)


def unfold(page) -> None:
    page.execute_script("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")


def choose(page, text: str) -> None:
    unfold(page)
    click(page, page.find_element(By.XPATH, f"//button[.='{text}']"))


def test_what_it_says_first(page, plan):
    assert page.title == page.find_element(By.TAG_NAME, "h1").text == "Plan of train_step on data=2, model=4"
    assert [b.text for b in visible(page, ".tiles dd")][0] == "8"
    titles = [heading.text for heading in page.find_elements(By.TAG_NAME, "h2")]
    assert titles[:4] == [
        "Bytes sent, by line",
        "The program, with its costs",
        "Memory on each device, over the program",
        "Collectives",
    ]
    assert len(cells(table(page, "Collectives"), 1)) > 20
    for title in (
        "Arguments at rest",
        "Results at rest",
        "Alive at the peak",
        "Saved for the backward pass",
        "Estimate",
    ):
        assert table(page, title)


def test_a_click_on_a_head_sorts(page):
    found = table(page, "Collectives")
    total = found.find_elements(By.TAG_NAME, "th")[5]
    click_head = total.find_element(By.TAG_NAME, "button")
    assert total.text == "per call"
    dearest_first = values(found, 6)
    assert dearest_first == sorted(dearest_first, reverse=True)
    click(page, click_head)
    assert total.get_attribute("aria-sort") == "descending" and values(found, 6) == dearest_first
    click(page, click_head)
    assert total.get_attribute("aria-sort") == "ascending" and values(found, 6) == dearest_first[::-1]
    click(page, found.find_element(By.CSS_SELECTOR, "th button"))
    assert cells(found, 1) == sorted(cells(found, 1)) and len(set(cells(found, 1))) > 2


def test_search_hides_the_other_rows(page):
    search = page.find_element(By.ID, "search")
    search.send_keys("reduce_scatter model")
    rows = [row.text for row in visible(page, "tbody:not(.more) tr")]
    assert rows and all("reduce_scatter" in row and "model" in row for row in rows)
    assert page.find_element(By.ID, "matches").text == f"{len(rows)} rows"
    search.clear()
    search.send_keys("no such thing")
    assert not visible(page, "section")


def test_a_reason_opens_to_its_facts(page):
    page.find_element(By.ID, "search").send_keys(
        "dot_general in"
    )  # what a product wants otherwise than it was made
    # Those whose words the search found in what is folded, it has unfolded.
    reasons = [r for r in visible(page, "details.because") if r.text.startswith("dot_general in")]
    facts = ((reason, reason.find_element(By.TAG_NAME, "div")) for reason in reasons)
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
    assert row.find_element(By.TAG_NAME, "th").text == number
    assert "all_reduce over" in row.get_attribute("textContent")
    top, height = page.execute_script("return [arguments[0].getBoundingClientRect().top, innerHeight]", row)
    assert 0 <= top < height


def test_how_an_uneven_array_lies(page):
    """257 rows over 4: blocks of 65, the last of 62, each on the two devices along `data`."""
    page.find_element(By.ID, "search").send_keys("embed.attend")
    unfold(page)
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
    unfold(page)
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


@pytest.mark.parametrize("width", [1400, 1000, 800, 500])
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
    page.set_window_size(1400, 900)


def resized(page, width: int, dark: bool = False) -> None:
    """A window whose page is just so wide."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


@pytest.fixture
def resize(browser):
    yield resized
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def page_size(page) -> tuple[int, int]:
    root = "document.documentElement"
    return tuple(
        page.execute_script(f"return [{root}.scrollWidth - {root}.clientWidth, {root}.scrollHeight]")
    )


def sticks_out(page) -> list[str]:
    """What lies right of the window, and what its own scrolling box hides there."""
    script = """return [...document.querySelectorAll('main *, nav, nav *, header *')]
        .filter((e) => e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1)
        .map((e) => e.outerHTML.slice(0, 100))"""
    return page.execute_script(script)


@pytest.fixture(scope="module")
def gpt2_page(browser, tmp_path_factory):
    """GPT-2's, on 8 devices."""
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    step, args = program(mesh, size="gpt2", batch=16, seq=128)
    path = tmp_path_factory.mktemp("gpt2") / "plan.html"
    step.plan(*args).to_html(path)
    return path


def test_gpt2_is_short_at_first(gpt2_page, browser, resize):
    assert gpt2_page.stat().st_size < 700_000
    resize(browser, 1400)
    browser.get(f"file://{gpt2_page}")
    over, height = page_size(browser)
    assert over == 0 and height < 8000
    assert len(browser.find_elements(By.CSS_SELECTOR, "button.array")) > 900  # all its arrays are there


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 800])
def test_nothing_of_gpt2_sticks_out(gpt2_page, browser, resize, width, dark):
    """Folded and unfolded; text stands out from its background."""
    resize(browser, width, dark)
    browser.get(f"file://{gpt2_page}")
    assert page_size(browser)[0] == 0 and sticks_out(browser) == []
    unfold(browser)
    assert page_size(browser)[0] == 0 and sticks_out(browser) == []
    for selector in (
        "body",
        "nav a",
        "td a",
        "thead th",
        "summary",
        ".tiles dt",
        ".phases",
        "figcaption",
        ".curve b",
    ):
        (found, *_) = browser.find_elements(By.CSS_SELECTOR, selector)
        colors = (
            found.value_of_css_property("color"),
            browser.execute_script("return getComputedStyle(document.body).backgroundColor"),
        )
        assert contrast(*colors) >= 4.5, (selector, colors)
        assert (luminance(colors[0]) > luminance(colors[1])) == dark


def luminance(color: str) -> float:
    """Relative luminance, WCAG 2.1."""
    channels = [int(c) / 255 for c in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("width", [1400, 800])
def test_contents_stay_and_lead_to_each_part(page, resize, width):
    resize(page, width)
    links = page.find_elements(By.CSS_SELECTOR, "nav a")
    assert len(links) >= 9
    for link in links:
        link.click()  # which is refused where it is out of sight
        section = page.find_element(By.ID, link.get_attribute("href").partition("#")[2])
        heading = section.find_element(By.TAG_NAME, "h2")
        script = (
            "return [arguments[0].getBoundingClientRect().top, arguments[1].getBoundingClientRect().bottom]"
        )
        top, bottom = page.execute_script(script, heading, page.find_element(By.TAG_NAME, "nav"))
        assert (bottom if width == 800 else 0) <= top < 900
        at = page.execute_script(
            "return arguments[0].getBoundingClientRect().top", page.find_element(By.TAG_NAME, "nav")
        )
        assert 0 <= at < 300


def test_a_keyboard_reaches_and_unfolds_all(page):
    """Tab goes through the page, Enter unfolds whatever is folded; nothing is left that it did not reach."""
    reached = page.execute_script("window.reached = new Set(); return 0")
    press = ActionChains(page)
    for _ in range(5000):
        press.send_keys(Keys.TAB).perform()
        reached, folded = page.execute_script("""const e = document.activeElement;
            if (e === document.body || reached.has(e)) return [false, false];
            reached.add(e);
            return [true, e.tagName === 'SUMMARY' && !e.parentNode.open]""")
        if not reached:
            break
        if folded:
            press.send_keys(Keys.ENTER).perform()
    missed, closed = page.execute_script("""const all = 'summary, button, a[href], input';
        return [[...document.querySelectorAll(all)]
                    .filter((e) => e.getClientRects().length && !reached.has(e)).map((e) => e.outerHTML.slice(0, 80)),
                [...document.querySelectorAll('details:not([open])')].length]""")
    assert (missed, closed) == ([], 0)
    assert page.execute_script("return reached.size") > 200


def test_what_has_the_focus_is_seen(page):
    for selector in ("nav a", "summary", "thead button", "button.array", "td a"):
        unfold(page)
        (found, *_) = visible(page, selector)
        page.find_element(By.ID, "search").send_keys(Keys.SHIFT)  # the keyboard is in use
        page.execute_script("arguments[0].focus()", found)
        assert found.value_of_css_property("outline-style") == "solid", selector
        assert found.value_of_css_property("outline-width") == "2px"


def test_the_picture_by_keyboard(page):
    """Enter chooses an array and leads to its picture, Escape leads back."""
    unfold(page)
    button = page.find_element(By.XPATH, "//button[.='state/params/layer_0/mlp/up/kernel']")
    assert not page.find_element(By.ID, "panel").is_displayed()
    page.execute_script("arguments[0].focus()", button)
    ActionChains(page).send_keys(Keys.ENTER).perform()
    assert page.switch_to.active_element.text == "argument state/params/layer_0/mlp/up/kernel"
    ActionChains(page).send_keys(Keys.TAB).perform()
    assert "block" in page.switch_to.active_element.get_attribute("class")
    ActionChains(page).send_keys(Keys.ESCAPE).perform()
    assert page.switch_to.active_element == button and not page.find_element(By.ID, "panel").is_displayed()


def test_search_finds_what_is_folded(page):
    tail = page.find_element(By.CSS_SELECTOR, "#peak .tail tr")
    words = tail.get_attribute("textContent")
    assert not tail.is_displayed()
    search = page.find_element(By.ID, "search")
    search.send_keys(re.search(r"[\w/]{8,}", words)[0])
    assert tail.is_displayed()
    search.send_keys(Keys.CONTROL + "a", Keys.DELETE)
    assert not tail.is_displayed()
