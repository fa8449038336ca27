"""Entries of our cache in torch.compiler.save_cache_artifacts() and load_cache_artifacts()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager


def register(kind: str, populate: Callable[[str, bytes], None]) -> None:
    """Register a kind of entries with torch: it passes loaded ones to `populate(name, content)`."""
    if kind in CacheArtifactFactory._artifact_types:
        return

    class LazyCacheArtifact(CacheArtifact):
        """An entry whose content is read when artifacts are saved, which most processes never do."""

        def __init__(self, key: str, content: bytes | Callable[[], bytes]) -> None:
            object.__setattr__(self, "key", key)
            object.__setattr__(self, "_content", content)

        @property
        def content(self) -> bytes:
            found = vars(self)["_content"]
            read: bytes = found() if callable(found) else found
            return read

        def __eq__(self, other: object) -> bool:
            return type(other) is type(self) and other.key == self.key

        def __hash__(self) -> int:
            return hash(self.key)

        @staticmethod
        def encode(content: Any) -> Any:
            return content

        def populate_cache(self) -> None:
            populate(self.key, self.content)

        @staticmethod
        def type() -> str:
            return kind

    CacheArtifactFactory.register(LazyCacheArtifact)


def record(kind: str, name: str, read: Callable[[], bytes]) -> None:
    """Record an entry, once for each name. `read` is called when artifacts are saved."""
    CacheArtifactManager.record_artifact(kind, name, read)
