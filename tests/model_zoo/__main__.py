"""``python -m tests.model_zoo [PART OF A NAME]`` prints the table of docs/models.md: end losses, compared with fp32."""

from __future__ import annotations

import sys
import warnings

import torch

from halfstep import HalfstepError, amp

from .kinds import KINDS, Kind
from .test_models import MIXES, in_fp32
from .training import train


def cell(kind: Kind, name: str, level: str, dtype: torch.dtype) -> str:
    try:
        end = train(kind, level, dtype).end
    except (HalfstepError, RuntimeError, AssertionError) as error:
        return type(error).__name__
    finally:
        amp.deactivate()
    return f"{end / in_fp32(name).end - 1:+.1%}".replace("-0.0%", "0.0%").replace("+0.0%", "0.0%")


def main(part: str = "") -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| kind of model | loss in fp32 | O1, bfloat16 | O1, float16 | O2, bfloat16 | O2, float16 | ops that meet |")
    print("|---|---|---|---|---|---|---|")
    for name, kind in KINDS.items():
        if part in name:
            begin, end = in_fp32(name)
            cells = [cell(kind, name, lv, dt) for lv in ("O1", "O2") for dt in (torch.bfloat16, torch.float16)]
            row = [name, f"{begin:.3g} to {end:.3g}", *cells, "yes" if name in MIXES else ""]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2])
