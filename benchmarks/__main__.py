"""``python -m benchmarks NAME``."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

BENCHMARKS = {
    "guide": "the table of Paddle's AMP guide, made here: time, loss and memory in fp32, at O1 and at O2",
    "simplenet": "nine linear layers: fp32, torch.autocast, pure 16-bit, halfstep O1, O2, O3, with fused optimizers",
    "scaler_cost": "what loss scaling adds to a fused AdamW step: torch.amp.GradScaler, amp.GradScaler, amp.scale_loss",
    "fused_step": "a step from scaled gradients to 16-bit weights: AdamW(fused=True) and GradScaler, and FusedAdam",
    "gradient_release": "backward pass and step of FusedAdam with gradient release and without: time, and bytes alive",
    "memory_speed": "the fused step on a CPU, divided by a plain copy of as many bytes, and many small tensors",
    "emulation": "16-bit products in fp32 kernels with 16-bit rounding, against the 16-bit kernels of the device",
    "reported": "cases that users reported: 16-bit products on a CPU without units, bfloat16 weights without masters",
    "shapes": "when 16 bits are faster than fp32 and when not: products, convolutions, small ops and steps, by size",
    "op_cost": "what op casting adds to an op and to a transformer block, against torch.autocast",
    "accumulation": "a window of passes on two processes: DistributedDataParallel under autocast or FSDP2, and O1, O2",
    "graph": "a captured graph with casts: torch.autocast, torch.compile under it, and static O1 and O2",
    "flat_masters": "a step with one flat fp32 master against one master for each parameter",
    "train_step": "TrainStep on two small models, against torch's loop, eager and compiled",
    "numerics": "what halfstep.numerics costs: Monitor, op_table and compare_step, against the plain step",
    "parity": "compiled and eager models in bfloat16 by kind of the first difference, and what parity costs",
    "profiling": "gains that halfstep.profile predicts for a fix against those measured, and what profiled steps cost",
    "formats": "rounding to fp8, MX and NVFP4, divided by a copy of the tensor",
    "eight_bit": "8-bit moments against fp32 ones: loss of a small language model, bytes, time of a step",
    "muon": "a step of Muon: torch's, and FusedMuon in fp32 and with split masters, on the matrices of a transformer",
    "check": "halfstep.check on a model of many small tensors, and what halfstep.watch adds to a step",
    "search": "planted faults that halfstep.search finds, and in how many guarded runs",
    "trainers": "a step in Lightning Fabric, with its own autocast and with halfstep's levels, and in a plain loop",
    "walks": "the files and functions of halfstep that one batch calls, for seven usual loops",
    "objects": "the kinds of objects of halfstep behind one attached optimizer, and their fields",
    "host_time": "Python time of a step by the number of tensors: torch.optim.AdamW(fused=True) and FusedAdam",
    "triton_offline": "the Triton kernels compiled for GPUs that are not here: bytes, access widths, registers, spills",
    "gpu_check": "the GPU tests and the benchmarks on CUDA, within 8 minutes, as JSON under $OUT",
}
"""Name and one line of help. Each name is also a module of this package, with ``add_arguments`` and ``run``."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    for name, help_line in BENCHMARKS.items():
        module = import_module(f".{name}", __package__)
        command = commands.add_parser(name, help=help_line, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
