"""The pictures of the documentation: for light and dark pages, with words for those who cannot see them."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
IMAGES = sorted((DOCS / "images").glob("*.svg"))
SHOWN = {
    path: alt
    for page in DOCS.rglob("*.md")
    for alt, path in re.findall(r"!\[([^\]]*)\]\((?:\.\./)?images/([^)]+)\)", page.read_text())
}
SVG = "{http://www.w3.org/2000/svg}"


def test_pages_show_every_image_and_no_other() -> None:
    assert set(SHOWN) == {image.name for image in IMAGES}


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_an_image_is_in_words_too(image: Path) -> None:
    picture = ElementTree.parse(image).getroot()
    assert len(picture.findtext(f"{SVG}title", "")) > 5
    assert len(picture.findtext(f"{SVG}desc", "")) > 50
    assert len(SHOWN[image.name]) > 50


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_an_image_has_colours_for_light_and_dark_pages(image: Path) -> None:
    picture = ElementTree.parse(image).getroot()
    light, _, dark = picture.findtext(f"{SVG}style", "").partition("@media (prefers-color-scheme: dark)")
    coloured = [set(re.findall(r"([.#\w ]+) \{[^}]*(?:fill|stroke): #", part)) for part in (light, dark)]
    assert {name.strip() for name in coloured[0]} == {name.strip() for name in coloured[1]}
    used = {name for element in picture.iter() for name in element.get("class", "").split()}
    assert used <= set(re.findall(r"\.(\w+) \{", light))
    fixed = [element.tag for element in picture.iter() if element.get("fill") or element.get("stroke")]
    assert not fixed  # a colour outside of the style would not change
