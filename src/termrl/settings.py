"""Settings in layers: defaults < TOML files < environment < flags, into one pydantic model.

Every bad value is reported at once, each as ``source: key: message``, where ``source`` is the file, the
environment variable or the command line that gave it. Nothing is read from the environment unless a caller
passes it in.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from termrl.errors import ConfigError

M = TypeVar("M", bound=BaseModel)
Key = tuple[str, ...]

ENV_PREFIX = "TERMRL_"
COMMAND_LINE = "command line"
_TRUE = "true"
_USER_INFO = re.compile(r"://[^/@\s]*@")
_NONE_WORDS = frozenset({"none", "null"})


@dataclass(frozen=True)
class Loaded(Generic[M]):
    """A validated config, what of it was given (not a default), and where each given key came from."""

    config: M
    given: dict[str, Any]
    sources: dict[Key, str]


@dataclass
class _Layers:
    """The layers merged so far, with the source of each leaf and every problem met on the way."""

    tree: dict[str, Any] = field(default_factory=dict)
    sources: dict[Key, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def put(self, key: Key, value: Any, source: str) -> None:
        """Set one leaf; whatever an earlier layer had at, above or below it gives way."""
        node = self.tree
        for depth, name in enumerate(key[:-1]):
            if not isinstance(node.get(name), dict):
                self._forget(key[: depth + 1])
                node[name] = {}
            node = node[name]
        self._forget(key)
        node[key[-1]] = value
        self.sources[key] = source

    def source_of(self, key: Key) -> str:
        """Where ``key`` came from: itself, its nearest given parent, else the last given key below it."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.sources:
                return self.sources[key[:length]]
        below = [source for at, source in self.sources.items() if at[: len(key)] == key]
        return below[-1] if below else "settings"

    def _forget(self, key: Key) -> None:
        for at in [at for at in self.sources if at[: len(key)] == key]:
            del self.sources[at]


def load_settings(
    model: type[M],
    *,
    files: Sequence[Path] = (),
    environ: Mapping[str, str] | None = None,
    aliases: Mapping[str, Key] | None = None,
    flags: Sequence[str] = (),
) -> Loaded[M]:
    """Fill ``model`` from defaults, then ``files`` in order, then ``environ``, then ``flags``.

    Args:
        model: the root model; every section in it forbids unknown keys.
        files: TOML files, later ones win.
        environ: variables such as ``TERMRL_TRAINING__LR`` (``__`` stands for the dot); others are left alone.
        aliases: variables of other names, and the key that each fills where ``TERMRL_…`` does not.
        flags: tokens such as ``--training.lr 1e-4``, ``--training.lr=1e-4``, ``--tasks.skip-broken``.

    Raises:
        ConfigError: with every problem of every layer.
    """
    layers = _Layers()
    for path in files:
        _add_file(layers, path)
    for variable, key in (aliases or {}).items():
        if text := (environ or {}).get(variable):
            layers.put(key, _from_text(model, key, text), variable)
    _add_environ(layers, model, environ or {})
    _add_flags(layers, model, flags)
    try:
        config = model.model_validate(layers.tree)
    except ValidationError as error:
        problems = [_describe(model, layers, dict(detail)) for detail in error.errors(include_url=False)]
        raise ConfigError([*layers.problems, *problems]) from None
    if layers.problems:
        raise ConfigError(layers.problems)
    return Loaded(config, layers.tree, layers.sources)


def to_toml(config: BaseModel | Mapping[str, Any]) -> str:
    """TOML text of a config (keys whose value is ``None`` are left out: that is their default)."""
    import tomli_w

    tree = config.model_dump(mode="json") if isinstance(config, BaseModel) else config
    return tomli_w.dumps(_plain(tree))


def known_keys(model: type[BaseModel], prefix: Key = ()) -> Iterator[Key]:
    """Every leaf key of ``model``, as a path."""
    for name, info in model.model_fields.items():
        section = _section_of(info.annotation)
        if section is None:
            yield (*prefix, name)
        else:
            yield from known_keys(section, (*prefix, name))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def _add_file(layers: _Layers, path: Path) -> None:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        layers.problems.append(f"{path}: no such file")
    except IsADirectoryError:
        layers.problems.append(f"{path}: is a folder, a TOML file is needed")
    except OSError as error:
        layers.problems.append(f"{path}: {error.strerror}")
    except UnicodeDecodeError:
        layers.problems.append(f"{path}: not UTF-8 text")
    except tomllib.TOMLDecodeError as error:
        layers.problems.append(f"{path}: not valid TOML: {error}")
    else:
        _add_tree(layers, tree, (), str(path))


def _add_tree(layers: _Layers, tree: Mapping[str, Any], prefix: Key, source: str) -> None:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            _add_tree(layers, value, (*prefix, name), source)
        else:
            layers.put((*prefix, name), value, source)


def _add_environ(layers: _Layers, model: type[BaseModel], environ: Mapping[str, str]) -> None:
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX):
            continue
        key = tuple(part.lower() for part in variable.removeprefix(ENV_PREFIX).split("__"))
        # a single unknown name is another program part's variable (TERMRL_CACHE): only sections are checked
        if len(key) == 1 and key[0] not in model.model_fields:
            continue
        layers.put(key, _from_text(model, key, environ[variable]), variable)


def _add_flags(layers: _Layers, model: type[BaseModel], flags: Sequence[str]) -> None:
    tokens = list(flags)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("--") or token == "--":
            layers.problems.append(f"{COMMAND_LINE}: {token}: unexpected (settings are given as --section.key value)")
            continue
        name, has_value, text = token[2:].partition("=")
        key = tuple(name.replace("-", "_").split("."))
        annotation = _annotation_at(model, key)
        if not has_value and annotation is None and key[-1].startswith("no_"):
            positive = (*key[:-1], key[-1].removeprefix("no_"))
            if bool in _members(_annotation_at(model, positive)):
                layers.put(positive, False, COMMAND_LINE)
                continue
        if not has_value:
            if tokens and not _is_flag(tokens[0]):
                text = tokens.pop(0)
            elif bool in _members(annotation) or annotation is None:
                text = _TRUE
            else:
                layers.problems.append(f"{COMMAND_LINE}: {'.'.join(key)}: a value is missing")
                continue
        layers.put(key, _from_text(model, key, text), COMMAND_LINE)


def _is_flag(token: str) -> bool:
    return token.startswith("--") and len(token) > 2


def _from_text(model: type[BaseModel], key: Key, text: str) -> Any:
    """The value that ``text`` means for ``key``: lists by comma or as TOML, tables as TOML, numbers by pydantic."""
    members = _members(_annotation_at(model, key))
    if type(None) in members and text.lower() in _NONE_WORDS:
        return None
    kinds = {typing.get_origin(member) or member for member in members}
    if kinds & {list, tuple, dict}:
        if text.lstrip().startswith(("[", "{")):
            try:
                return tomllib.loads(f"value = {text}")["value"]
            except tomllib.TOMLDecodeError:
                return text
        if dict not in kinds:
            return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the annotation alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(annotation) for member in _members(part))
    return (annotation,)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _annotation_at(model: type[BaseModel], key: Key) -> Any:
    """The annotation of the field at ``key``, or ``None`` where there is no such field."""
    current: type[BaseModel] | None = model
    annotation: Any = None
    for name in key:
        if current is None or name not in current.model_fields:
            return None
        annotation = current.model_fields[name].annotation
        current = _section_of(annotation)
    return annotation


def _describe(model: type[BaseModel], layers: _Layers, detail: dict[str, Any]) -> str:
    """One pydantic error as ``source: key: message``."""
    key, position = _field_path(model, tuple(detail["loc"]))
    message = str(detail["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if detail["type"] == "extra_forbidden":
        message = "unknown key" + _suggestion(model, key)
    elif detail["type"] in ("model_type", "model_attributes_type"):
        message = "must be a table of settings"
    else:
        message = message[:1].lower() + message[1:]
        if detail["type"] != "missing" and not isinstance(detail.get("input"), dict):
            message += f" (got {_USER_INFO.sub('://…@', repr(detail.get('input')))})"
    return f"{layers.source_of(key)}: {'.'.join(key) or 'settings'}{position}: {message}"


def _field_path(model: type[BaseModel], loc: tuple[Any, ...]) -> tuple[Key, str]:
    """The field of ``loc`` and the list position in it, without the union tags that pydantic adds."""
    path: list[str] = []
    position = ""
    current: type[BaseModel] | None = model
    for part in loc:
        if current is not None:
            path.append(str(part))
            info = current.model_fields.get(str(part))
            current = _section_of(info.annotation) if info is not None else None
        elif isinstance(part, int):
            position += f"[{part}]"
    return tuple(path), position


def _suggestion(model: type[BaseModel], key: Key) -> str:
    parent = model if len(key) == 1 else _section_of(_annotation_at(model, key[:-1]))
    siblings = list(parent.model_fields) if parent is not None else []
    close = difflib.get_close_matches(key[-1], siblings, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {'.'.join((*key[:-1], close[0]))}?"
    every = {".".join(path): path for path in known_keys(model)}
    same_leaf = [dotted for dotted, path in every.items() if path[-1] == key[-1]]
    elsewhere = same_leaf or difflib.get_close_matches(".".join(key), list(every), n=1, cutoff=0.7)
    return f"; did you mean {elsewhere[0]}?" if elsewhere else ""
