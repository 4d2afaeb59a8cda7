"""The choice of a decoder's namespace."""

import sys


def only(found):
    """The one namespace that agrees with all stated facts; otherwise prints what to do, and ends the process."""
    agreeing = [namespace for namespace in found if not namespace.differs]
    if len(agreeing) == 1:
        return agreeing[0]
    if agreeing:
        known = ", ".join(namespace.digest for namespace in agreeing)
        sys.exit(f"several namespaces agree with what is stated ({known}): state more facts to engine.find, such as none_hash")
    if not found:
        sys.exit("the sidecar knows no namespace: let vLLM answer one prompt first")
    lines = [
        f"{namespace.digest}: {fact} is {ours!r} here and {theirs!r} there: {remedy}"
        for namespace in found
        for fact, ours, theirs, remedy in namespace.differs
    ]
    sys.exit("\n".join(["this engine agrees with no namespace of the sidecar:", *lines]))
