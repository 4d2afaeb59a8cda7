"""The common parts of tests, benchmarks and scripts: real sidecars and engines, child processes, ports, metrics, watchdogs.

The folder `tests` must be on the path of their programs: tests/pytest.ini, benches/run and each program set it in one line, and
`child.Child` passes it on to its processes.
"""
