"""What tests, benchmarks and scripts share: real sidecars and engines, child processes, ports, metrics, watchdogs, files.

Whoever uses it has this package's folder's parent, `tests`, on its path: tests/pytest.ini, benches/run and each program say so
in one line, and `child.Child` passes it on to the processes that it starts.
"""
