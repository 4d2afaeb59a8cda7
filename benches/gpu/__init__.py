"""Benchmarks on a GPU, run by benches/run gpu/NAME."""
