"""Multi-tensor operations over a cached plan of tensor lists."""
