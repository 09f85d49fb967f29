"""PyTorch where it is not installed: files of tests may import what needs it, and a test that uses that is skipped."""

import builtins
import os
from types import FunctionType

import pytest

NEED_TORCH = {"torch", "transformers", "peft", "lm_eval", "triton"}


class Absent:
    """A module that is not installed, or anything of it.

    While pytest collects tests, it may be called, listed and inherited from. In a test, any use skips the test.
    """

    def __init__(self, name):
        self._name = name

    def _used(self, name):
        if "PYTEST_CURRENT_TEST" in os.environ:
            pytest.skip(f"needs {name}")
        return Absent(name)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._used(f"{self._name}.{name}")

    def __call__(self, *args, **keywords):
        if args and isinstance(args[0], FunctionType):  # it decorates a function, which is a test or has its own uses
            return args[0]
        return self._used(self._name)

    def __iter__(self):
        return iter([self._used(self._name)])

    def __mro_entries__(self, bases):
        return ()


def let_tests_import_what_is_absent():
    """Only files of tests and benches: the package itself gets the error."""
    real_import = builtins.__import__

    def import_or_stand_in(name, globals=None, locals=None, fromlist=(), level=0):
        try:
            return real_import(name, globals, locals, fromlist, level)
        except ModuleNotFoundError as error:
            importer = str((globals or {}).get("__name__")).partition(".")[0]
            if importer in ("tests", "bench") and str(error.name).partition(".")[0] in NEED_TORCH:
                return Absent(name if fromlist else name.partition(".")[0])
            raise

    builtins.__import__ = import_or_stand_in
