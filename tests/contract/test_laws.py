"""Every law is collected: a test function whose name pytest does not recognise would pass for ever, unseen."""

import ast
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent


def _public_functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    ]


def _is_fixture(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("fixture" in ast.unparse(decorator) for decorator in function.decorator_list)


def every_function_of_a_test_module_is_collected_or_used(request: pytest.FixtureRequest) -> None:
    patterns = request.config.getini("python_functions")
    unseen = []
    for file in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        used = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        unseen += [
            f"{file.relative_to(TESTS)}: {function.name}"
            for function in _public_functions(tree)
            if not any(fnmatch(function.name, pattern) or function.name.startswith(pattern) for pattern in patterns)
            and not _is_fixture(function)
            and not used[function.name]
        ]
    assert not unseen, "rename them, or widen python_functions in pyproject.toml: " + "; ".join(unseen)
