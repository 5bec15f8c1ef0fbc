"""The pictures of the documentation: for light and dark pages, with words for those who cannot see them."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
MARKS = {"logo.svg", "favicon.svg"}  # of the site itself, on grounds of their own
IMAGES = [image for image in sorted((DOCS / "images").glob("*.svg")) if image.name not in MARKS]
SHOWN = {
    path: alt
    for page in DOCS.rglob("*.md")
    for alt, path in re.findall(r"!\[([^\]]*)\]\((?:\.\./)?images/([^)]+)\)", page.read_text())
}
RULE = re.compile(r"([.#\w, ]+) \{([^}]*)\}")
SVG = "{http://www.w3.org/2000/svg}"


def test_pages_show_every_image_and_no_other() -> None:
    assert set(SHOWN) == {image.name for image in IMAGES}


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_an_image_is_in_words_too(image: Path) -> None:
    picture = ElementTree.parse(image).getroot()
    assert len(picture.findtext(f"{SVG}title", "")) > 5
    assert len(picture.findtext(f"{SVG}desc", "")) > 50
    assert len(SHOWN[image.name]) > 50


def coloured(style: str) -> set[str]:
    """The selectors that a part of a style gives a colour to."""
    rules = [names for names, what in RULE.findall(style) if re.search(r"(?:fill|stroke): #", what)]
    return {name.strip() for names in rules for name in names.split(",")}


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_an_image_has_colours_for_light_and_dark_pages(image: Path) -> None:
    picture = ElementTree.parse(image).getroot()
    light, _, dark = picture.findtext(f"{SVG}style", "").partition("@media (prefers-color-scheme: dark)")
    assert coloured(light) == coloured(dark)
    used = {name for element in picture.iter() for name in element.get("class", "").split()}
    assert used <= {name for names, _ in RULE.findall(light) for name in re.findall(r"\.(\w+)", names)}
    fixed = [element.tag for element in picture.iter() if element.get("fill") or element.get("stroke")]
    assert not fixed  # a colour outside of the style would not change
