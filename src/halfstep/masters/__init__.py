"""Master weights: the fp32 values of 16-bit weights, which optimizers update."""
