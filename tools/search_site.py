"""Check that what people type into the site's search finds the right page first.

It runs the site's own search in Node.js, on the index that mkdocs built. ``make docs`` runs it. A page that its text
does not bring to the top has ``tags`` or ``search.boost`` at its beginning.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

SEARCHES = {
    "multi GPU": "how-to/ddp/",
    "huggingface": "trainers/transformers/",
    "loss does not decrease": "troubleshooting-weights/",
    "loss is nan": "troubleshooting/",
    "loss scale": "loss-scaling/",
    "gradient clipping": "how-to/clip-gradients/",
    "checkpoint": "how-to/save-and-resume/",
    "install": "quickstart/",
    "windows": "quickstart/",
    "out of memory": "troubleshooting/",
    "gradscaler": "api/grad_scaler/",
    "autocast": "api/casting/",
    "torch.amp": "from-torch-amp/",
    "apex": "from-apex/",
    "paddle": "from-paddle/",
    "resume training": "how-to/save-and-resume/",
    "gradient accumulation": "how-to/accumulate-gradients/",
    "bfloat16 or float16": "how-to/choose-level/",
    "slow": "how-to/why-not-faster/",
    "pytorch lightning": "trainers/lightning/",
    "master weights": "master-weights/",
    "ema": "how-to/average-weights/",
    "fp8": "how-to/train-in-fp8/",
    "batchnorm": "levels/",
    "overflow": "loss-scaling/",
    "without a gpu": "precision/",
    "faq": "faq/",
}
"""A query, and the page that must come first."""


def wrong(site: Path) -> list[str]:
    """Return a sentence for each query that finds another page first."""
    script = Path(__file__).with_suffix(".js")
    command = [shutil.which("node") or "node", str(script), str(site), *SEARCHES]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [
        f'the search for "{query}" finds {pages[:4]}, and not {page} first'
        for (query, page), pages in zip(SEARCHES.items(), found, strict=True)
        if pages[:1] != [page]
    ]


if __name__ == "__main__":
    if shutil.which("node") is None:
        print("SKIPPED: the site's search is not checked, because node is not on PATH.")
    else:
        found = wrong(Path(sys.argv[1]))
        print("\n".join(found))
        sys.exit(1 if found else 0)
