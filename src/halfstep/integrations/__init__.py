"""halfstep in trainers: Lightning, Accelerate, Transformers and timm. Each file is imported when it is asked for."""
