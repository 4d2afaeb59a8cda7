"""Benchmarks, run by benches/run."""
