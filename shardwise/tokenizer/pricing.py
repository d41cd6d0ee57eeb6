"""Where a template has to pay: written into its program before that is compiled. Knows syntax, and no values."""

from __future__ import annotations

from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.visitor import NodeTransformer

NODES = 4
"""A power of two: so many places of a program are passed for one step."""
NO_STATEMENTS = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)


def price(tree: nodes.Template) -> nodes.Template:
    """The program with its prices. Raises SecurityError for what no chat template needs."""
    found: nodes.Template = _Pricing().visit(tree)
    return found


class _Pricing(NodeTransformer):
    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if isinstance(node, NO_STATEMENTS):
            raise SecurityError(f"{type(node).__name__.lower()!r} is not supported in chat templates")
        size = 1 + (sum(1 for _ in node.find_all(nodes.Node)) >> NODES) if isinstance(node, _REPEATED) else 0
        found = super().visit(node, *args, **kwargs)
        if size:
            found.body.insert(0, nodes.ExprStmt(_pay(nodes.Const(size), "step"), lineno=node.lineno))
        return found

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _pay(node.iter, "scan")
        if node.test is not None:
            node.test = nodes.And(_pay(nodes.Const(1), "step"), node.test)
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:  # noqa: N802
        return self._checked(node, node.attr)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self._checked(node, node.arg.value if isinstance(node.arg, nodes.Const) else None)
        return _pay(node, "scan") if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _pay(nodes.List(node.nodes), "concat")

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _pay(node.key, "weigh")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """A constant is soon compared, but everything is looked through for it."""
        self.generic_visit(node)
        left_plain = _is_plain(node.expr)
        for operand in node.ops:
            if not _is_plain(operand.expr):
                if not left_plain:
                    operand.expr = _pay(operand.expr, "weigh")
                elif operand.op in ("in", "notin"):
                    operand.expr = _pay(operand.expr, "scan")
        if not left_plain and not all(_is_plain(operand.expr) for operand in node.ops):
            node.expr = _pay(node.expr, "weigh")
        return node

    def _checked(self, node: nodes.Node, name: Any) -> nodes.Node:
        if isinstance(name, str) and name.startswith("__"):
            raise SecurityError(f"{name!r} is out of bounds for a template")
        self.generic_visit(node)
        return node


_REPEATED = (nodes.For, nodes.Macro, nodes.CallBlock)


def _pay(node: nodes.Node, how: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), f" {how}", [], [], None, None, lineno=node.lineno)


def _is_plain(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) or (
        isinstance(node, nodes.List | nodes.Tuple) and all(map(_is_plain, node.items))
    )
