"""Tell transformers about attn_implementation="retrieval" without importing transformers.

If transformers' model code is loaded already, register now; otherwise register right after it loads. The
import hook below is what lets `import retrieval_attn` stay free of torch and still be all a user writes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_TRIGGER = "transformers.modeling_utils"  # defines AttentionInterface; every model class imports it


def register_with_transformers() -> None:
    """Register now if transformers' model code is loaded, else as soon as it is."""
    if _TRIGGER in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterTransformers) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTransformers())


def _register() -> None:
    from retrieval_attn.model.hooks import register

    register()


class _AfterTransformers(importlib.abc.MetaPathFinder):
    """Finds one module by the ordinary finders, and runs `_register` once it is executed.

    It stays in place until then: a mere question for the spec must not use it up.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TRIGGER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader, self)
        return spec


class _ThenRegister(importlib.abc.Loader):
    """A loader that does what the module's own loader does, then registers."""

    def __init__(self, loader: importlib.abc.Loader, finder: importlib.abc.MetaPathFinder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _register()
