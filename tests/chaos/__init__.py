"""Faults at random moments under a load of real requests, and what they cost.

`campaign` runs it, `faults` says what strikes, `load` asks and checks, `figures` counts. `python tests/chaos`
is the long form; tests/e2e/test_chaos.py runs a short one.
"""
