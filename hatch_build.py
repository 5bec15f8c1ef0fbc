"""The README as it is in a package: links that are relative in the repository become addresses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

SITE = "https://halfstep.github.io/halfstep/"
REPOSITORY = "https://github.com/halfstep/halfstep/blob/main/"


class ReadmeHook(MetadataHookInterface):
    """Sets ``readme`` of the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling when it builds."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_addresses(text)}


def with_addresses(text: str) -> str:
    """A README whose relative links lead to the site, or to the repository for what the site does not have."""
    text = re.sub(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)", lambda found: address(found[1]), text)
    return re.sub(r"^(\[[\w-]+\]: )(?![a-z]+:|#)(\S+)$", lambda found: found[1] + address(found[2]), text, flags=re.M)


def address(path: str) -> str:
    """The address of a file of the repository, given as ``docs/fused.md#section``."""
    file, mark, section = path.partition("#")
    if not file.startswith("docs/"):
        return REPOSITORY + path
    page = re.sub(r"(^|/)index$", r"\1", file.removeprefix("docs/").removesuffix(".md"))
    return SITE + (page + "/" if file.endswith(".md") and page and not page.endswith("/") else page) + mark + section
