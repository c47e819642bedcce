"""Results in a file of JSON lines: appended whole, read again by the next run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvsieve.errors import ConfigError
from kvsieve.evaluate.decode import Outcome

FORMAT = 1


@dataclass(frozen=True)
class Key:
    """What a result is of: a task's ``sample`` at a context, decoded by a contender under a budget in tokens."""

    task: str
    context: int
    tokens: int
    contender: str
    sample: int


@dataclass(frozen=True)
class Result:
    """A result, and the digest of the flow that gave it."""

    key: Key
    digest: str
    outcome: Outcome


class ResultStore:
    """Results of one setting, in memory and, given a path, in a file.

    Args:
        settings: what all results have in common, as plain JSON values.
        path: file of JSON lines: the settings, then one result a line; None: nothing is kept.

    Raises:
        ConfigError: the file holds results of other settings, or no results at all.
    """

    def __init__(self, settings: Mapping[str, Any], path: Path | None) -> None:
        self.settings, self.path = {"kvsieve_eval": FORMAT, **settings}, path
        self.results: dict[Key, Result] = {}
        if path is None:
            return
        try:
            if path.exists() and path.stat().st_size:
                self._read(path)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._append([self.settings])
        except OSError as error:
            raise ConfigError(f"--results {path}: {error.strerror or error}; expected a file to write to") from None

    def add(self, results: Iterable[Result]) -> None:
        """Keep results; in the file they appear together or not at all, but for a crash of the machine itself."""
        results = list(results)
        self.results.update({result.key: result for result in results})
        if self.path is not None:
            self._append([{**asdict(one.key), "digest": one.digest, **asdict(one.outcome)} for one in results])

    def refuse_other_versions(self, digests: Mapping[str, str]) -> None:
        """Refuse results of a flow whose source or arguments have changed: ``digests`` by contender.

        Raises:
            ConfigError: names the flow.
        """
        for key, result in self.results.items():
            if digests.get(key.contender, result.digest) != result.digest:
                raise ConfigError(
                    f"--results {self.path}: it holds results of another version of flow {key.contender}; give the "
                    "flow another name, or use another file"
                )

    def _read(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        whole, _, torn = text.rpartition("\n")
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            lines = []
        if not lines or not isinstance(lines[0], dict) or "kvsieve_eval" not in lines[0]:
            raise ConfigError(f"--results {path}: expected a file that kvsieve eval wrote, received another one")
        if lines[0] != self.settings:
            found = {**dict.fromkeys(self.settings), **lines[0]}
            other = [
                f"{k} {found[k]!r}, now {self.settings.get(k)!r}" for k in found if found[k] != self.settings.get(k)
            ]
            raise ConfigError(
                f"--results {path}: it holds results of other settings ({'; '.join(other)}); repeat those settings, "
                "or use another file"
            )
        if torn:  # a run was killed while it wrote
            os.truncate(path, len(whole.encode()) + 1)
        for line in lines[1:]:
            self._load(line)

    def _load(self, line: dict[str, Any]) -> None:
        key = Key(**{name: line.pop(name) for name in Key.__dataclass_fields__})
        digest = line.pop("digest")
        self.results[key] = Result(key, digest, Outcome(**line))

    def _append(self, lines: list[dict[str, Any]]) -> None:
        assert self.path is not None
        text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
        with self.path.open("ab", buffering=0) as file:
            file.write(text.encode())
            os.fsync(file.fileno())
