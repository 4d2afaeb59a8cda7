"""Runs a program as a container's default seccomp profile does: io_uring is answered with EPERM."""

import ctypes
import os
import struct
import sys

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD, JUMP_GE, JUMP_GT, RETURN = 0x20, 0x35, 0x25, 0x06
EPERM_ANSWER, ALLOWED = 0x0005_0001, 0x7FFF_0000
# io_uring_setup to io_uring_register, the same numbers on every architecture.
FIRST, LAST = 425, 427
RULES = ((LOAD, 0, 0, 0), (JUMP_GE, 0, 2, FIRST), (JUMP_GT, 1, 0, LAST), (RETURN, 0, 0, EPERM_ANSWER), (RETURN, 0, 0, ALLOWED))

rules = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in RULES))
program = ctypes.create_string_buffer(struct.pack("HP", len(RULES), ctypes.addressof(rules)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
for option, *arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))):
    if prctl(option, *arguments, 0, 0) != 0:
        sys.exit(f"prctl {option}: {os.strerror(ctypes.get_errno())}")
os.execv(sys.argv[1], sys.argv[1:])
