"""Faults at random moments under a load of real requests, and what they cost.

`campaign` runs it, `faults` says what strikes, `load` asks and checks, `figures` counts. `pair` strikes two engines behind
a router, where one computes what the other answers. `python tests/chaos` is the long form of both; tests/e2e/test_chaos.py
and tests/e2e/test_pair_chaos.py run short ones.
"""
