"""Adapters for trainers: Lightning, Accelerate, Transformers and timm. Each file is imported on first use."""
