"""Finds names in a package's sources by syntax alone: nothing is imported, nothing runs.

It follows base classes, and imports within the package, relative and starred imports too. It does not see names that a
module makes while it runs (`setattr`, `globals()`).
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".py", ".cpp", ".cu", ".h", ".hpp")
DEPTH = 20  # levels of imports of imports, and of bases of bases


@dataclass(frozen=True)
class Found:
    """A definition and its module; `node` is None if another package, which is not searched, defines it."""

    module: str
    node: ast.stmt | ast.Module | None


class SourceTree:
    """The sources of one package.

    Args:
        root: the folder that contains the package's folder, or its modules.
        package: the package's folder, the only one that is searched.
    """

    def __init__(self, root: Path, package: str):
        self.root, self.package = root, package
        self._parse = functools.cache(self._parsed)

    def file_of(self, module: str) -> Path | None:
        """Return the file of a module (a dotted name), the folder of a package without `__init__.py`, or None."""
        path = self.root.joinpath(*module.split("."))
        candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py", path)
        return next((each for each in candidates if each.is_file() or each is path and path.is_dir()), None)

    def find(self, module: str, name: str, depth: int = DEPTH) -> Found | None:
        """Return the definition of a dotted name in a module: a function, a class, an attribute or a submodule.

        Members of a class that another package defines are not looked for.

        Raises:
            SyntaxError: this Python cannot parse a file on the way.
        """
        first, *members = name.split(".")
        found = self._in_module(module, first, depth)
        for member in members:
            if found is None or found.node is None:
                return found
            found = self._in_class(found, member, depth)
        return found

    def parameters(self, found: Found) -> tuple[set[str], bool]:
        """Return the parameters of a function or constructor, and whether it takes any others (`**kwargs`).

        The parameters of a dataclass are its fields and its bases' fields. An unknown function takes any parameter.
        """
        node = found.node
        if isinstance(node, ast.ClassDef):
            made = self._in_class(found, "__init__", DEPTH)
            if made is not None and made.node is not None:
                return self.parameters(made)
            return self._fields(found), self._has_unknown_base(found)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}, given.kwarg is not None
        return set(), True

    def elsewhere(self, name: str, but: str) -> list[str]:
        """Return other modules of the package that define a dotted name themselves."""
        first = name.partition(".")[0]
        pattern = re.compile(
            rf"^\s*(class|def|async def) {re.escape(first)}\b|^\s*{re.escape(first)}\s*[:=]", re.MULTILINE
        )
        modules = []
        for path in self.files(".py"):
            module = self._module_of(path)
            if module == but or not pattern.search(_text(path)):
                continue
            try:
                found = self.find(module, name)
            except SyntaxError:
                continue
            if found is not None and found.node is not None and (found.module == module or "." in name):
                modules.append(module)
        return modules

    def contains(self, file: str, text: str) -> bool:
        """Return whether a file, given by its path from the root, contains a text, ignoring white space."""
        path = self.root / file
        return path.is_file() and _bare(text) in _bare(_text(path))

    def files_with(self, text: str) -> list[str]:
        """Return the paths, from the root, of the package's files that contain a text."""
        return [
            path.relative_to(self.root).as_posix()
            for path in self.files(*SUFFIXES)
            if _bare(text) in _bare(_text(path))
        ]

    def files(self, *suffixes: str) -> list[Path]:
        """Return the package's files with these suffixes, sorted."""
        inside = (self.root / self.package).rglob("*")
        return sorted(path for path in inside if path.suffix in suffixes and path.is_file())

    def _module_of(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _parsed(self, module: str) -> ast.Module:
        path = self.file_of(module)
        is_file = path is not None and path.is_file()
        return ast.parse(_text(path), str(path)) if is_file else ast.Module(body=[], type_ignores=[])

    def _in_module(self, module: str, name: str, depth: int) -> Found | None:
        if self.file_of(module) is None or depth == 0:
            return None
        starred: list[str] = []
        candidates: list[Found] = []
        for node in _statements(self._parse(module).body):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    if alias.name == "*":
                        starred.append(self._source(module, node))
                    elif (alias.asname or alias.name.partition(".")[0]) == name:
                        candidates += filter(None, [self._imported(module, node, alias, depth - 1)])
            elif name in _bound(node):
                candidates.append(self._aliased(module, name, node, depth - 1))
        defined = [each for each in candidates if isinstance(each.node, (ast.ClassDef, ast.FunctionDef))]
        if candidates:
            return (defined or candidates)[0]
        for other in starred:
            found = self._in_module(other, name, depth - 1)
            if found is not None:
                return found
        return self._submodule(f"{module}.{name}")

    def _submodule(self, module: str) -> Found | None:
        return Found(module, self._parse(module)) if self.file_of(module) is not None else None

    def _source(self, module: str, node: ast.Import | ast.ImportFrom) -> str:
        """Return the module that an import statement imports from."""
        if isinstance(node, ast.Import) or not node.level:
            return getattr(node, "module", None) or ""
        path = self.file_of(module)
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + (path is not None and path.name == "__init__.py")]
        return ".".join([*parts, *filter(None, [node.module])])

    def _imported(self, module: str, node: ast.Import | ast.ImportFrom, alias: ast.alias, depth: int) -> Found | None:
        source = self._source(module, node)
        if isinstance(node, ast.Import):
            return self._submodule(alias.name if alias.asname else alias.name.partition(".")[0]) or Found("", None)
        if self.file_of(source) is None:
            is_own = source.partition(".")[0] == self.package
            return None if is_own else Found("", None)
        return self._in_module(source, alias.name, depth)

    def _aliased(self, module: str, name: str, node: ast.stmt, depth: int) -> Found:
        """Return the definition of `other` for `name = other`, if it is found; else the statement itself."""
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign) and isinstance(value, ast.Name) and value.id != name:
            other = self._in_module(module, value.id, depth)
            if other is not None and other.node is not None:
                return other
        return Found(module, node)

    def _in_class(self, owner: Found, name: str, depth: int) -> Found | None:
        """Return the definition of a member of a class or of its bases, or None.

        That is a method, an attribute of the class, or the method that sets the attribute on the object. If `owner` is
        a submodule, the member is a name in it.
        """
        node = owner.node
        if isinstance(node, ast.Module):
            return self._in_module(owner.module, name, depth)
        if not isinstance(node, ast.ClassDef):
            return None
        for statement in _statements(node.body):
            if name in _bound(statement):
                return self._member(owner, name, statement)
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and name in _set_on_object(method):
                return Found(owner.module, method)
        for base in self._bases(owner, depth - 1):
            found = self._in_class(base, name, depth - 1)
            if found is not None:
                return found
        return None

    def _member(self, owner: Found, name: str, statement: ast.stmt) -> Found:
        """Return the definition of `other` for `name = other` in a class's body; else the statement itself."""
        value = getattr(statement, "value", None)
        assert isinstance(owner.node, ast.ClassDef)
        if isinstance(statement, ast.Assign) and isinstance(value, ast.Name) and value.id != name:
            for other in _statements(owner.node.body):
                if value.id in _bound(other):
                    return Found(owner.module, other)
        return Found(owner.module, statement)

    def _bases(self, owner: Found, depth: int) -> Iterator[Found]:
        """Yield the bases that are classes of the package."""
        assert isinstance(owner.node, ast.ClassDef)
        for base in owner.node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            found = self.find(owner.module, name, depth) if depth > 0 else None
            if found is not None and isinstance(found.node, ast.ClassDef) and found.node is not owner.node:
                yield found

    def _fields(self, owner: Found) -> set[str]:
        assert isinstance(owner.node, ast.ClassDef)
        own = {
            each.target.id
            for each in owner.node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        return own.union(*(self._fields(base) for base in self._bases(owner, DEPTH)))

    def _has_unknown_base(self, owner: Found) -> bool:
        """Return whether another package defines a base, so that the constructor may take any argument."""
        assert isinstance(owner.node, ast.ClassDef)
        known = list(self._bases(owner, DEPTH))
        return len(known) < len(owner.node.bases) or any(self._has_unknown_base(base) for base in known)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or a class, also those under `if`, `try`, `with` and loops."""
    for node in body:
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        skips_body = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for field in ("orelse", "finalbody") if skips_body else ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return {part.id for target in targets if target for part in ast.walk(target) if isinstance(part, ast.Name)}
    return set()


def _set_on_object(method: ast.FunctionDef) -> set[str]:
    """Return the attributes that a method sets on its first argument."""
    arguments = [*method.args.posonlyargs, *method.args.args]
    if not arguments:
        return set()
    return {
        part.attr
        for part in ast.walk(method)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == arguments[0].arg
    }


@functools.lru_cache(maxsize=4096)
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _bare(text: str) -> str:
    return "".join(text.split())
