"""The demo and the benchmarks: each starts real SGLang servers and compares them."""
