"""PyTorch where it is not installed: files of tests may import what needs it, and a test that uses that is skipped."""

import builtins
import os
import sys
from types import FunctionType, SimpleNamespace

import pytest

from specbeam.errors import SpecbeamError

NEED_TORCH = {"torch", "transformers", "peft", "lm_eval", "triton", "nbclient", "nbformat"}
"""Packages that need PyTorch, and packages of extras that need it."""


def needs(what):
    """Skip a test that needs something of an absent package."""
    pytest.skip(f"needs {what}")


class Absent:
    """A module that is not installed, or anything of it.

    While pytest collects tests, it may be called, indexed, listed and inherited from. Any use in a test skips the test.
    """

    def __init__(self, name):
        self._name = name

    def _used(self, name):
        if "PYTEST_CURRENT_TEST" in os.environ:
            needs(name)
        return Absent(name)

    def __getattr__(self, name):
        if name.startswith("__") and name not in ("__file__", "__version__"):
            raise AttributeError(name)
        return self._used(f"{self._name}.{name}")

    def __call__(self, *args, **keywords):
        if args and isinstance(args[0], FunctionType):  # it decorates a function
            return args[0]
        return self._used(self._name)

    def __getitem__(self, key):
        return self._used(self._name)

    def __iter__(self):
        return iter([self._used(self._name)])

    def __mro_entries__(self, bases):
        return ()


class PartlyAbsent:
    """A module that imports some of its names only with PyTorch."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        try:
            return getattr(self._module, name)
        except SpecbeamError:
            return Absent(f"{self._module.__name__}.{name}")


def let_tests_import_what_is_absent():
    """Only files of tests and benches: the package itself gets the error."""
    real_import = builtins.__import__

    def import_or_stand_in(name, globals=None, locals=None, fromlist=(), level=0):
        try:
            return real_import(name, globals, locals, fromlist, level)
        except (ModuleNotFoundError, SpecbeamError) as error:
            importer = str((globals or {}).get("__name__")).partition(".")[0]
            if importer not in ("tests", "bench"):
                raise
            if isinstance(error, SpecbeamError):  # it says which extra has what is missing
                return PartlyAbsent(sys.modules[name])
            if str(error.name).partition(".")[0] not in NEED_TORCH:
                raise
            if not fromlist:
                return Absent(name.partition(".")[0])
            return SimpleNamespace(**{imported: Absent(f"{name}.{imported}") for imported in fromlist})

    builtins.__import__ = import_or_stand_in
