"""What a chat template may do, and how much: jinja's sandbox, with lists of what is allowed and a price on all of it.

Every loop, call and operation costs steps, more where it handles or makes much, and is paid for before it happens. So
no template can run long or grow large, and none is held up that only writes a chat. Knows neither messages nor tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from types import BuiltinMethodType, MethodType
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from shardwise.tokenizer import filters
from shardwise.tokenizer.meter import ITEMS, Meter
from shardwise.tokenizer.pricing import price

MAX_SOURCE = 2**18
"""Characters of a template; the largest known have a tenth of that."""
MAX_BITS = 1024
"""Of a whole number."""
METER = " meter"
"""The variable that holds a rendering's meter. No template can spell it."""

TEXT = frozenset(
    (
        *("split", "rsplit", "splitlines", "strip", "lstrip", "rstrip", "upper", "lower", "capitalize"),
        *("title", "casefold", "startswith", "endswith", "find", "rfind", "index", "rindex", "count"),
        *("replace", "join", "partition", "rpartition", "removeprefix", "removesuffix", "isdigit", "isdecimal"),
        *("isnumeric", "isalpha", "isalnum", "isspace", "isupper", "islower", "istitle"),
    )
)
METHODS: dict[type, frozenset[str]] = {
    str: TEXT,
    list: frozenset({"index", "count", "copy"}),
    tuple: frozenset({"index", "count"}),
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    LoopContext: frozenset(
        (
            *("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"),
            *("previtem", "nextitem", "cycle", "changed"),
        )
    ),
}
"""All that a template may reach of a value by a dot, besides what dictionaries hold under a name."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates whose variables include a Meter as ``METER``. Anything refused is a SecurityError."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, functions: dict[str, Callable[..., Any]], extensions: Iterable[Any]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=list(extensions), finalize=_finalize)
        self.globals = {"range": self.globals["range"], "dict": dict, "namespace": Namespace, **functions}
        self._functions = tuple(self.globals.values())
        known = self.filters
        self.filters = {
            **{name: _paid(known[name], _light) for name in filters.LIGHT_FILTERS},
            **{name: _paid(known[name], _shallow) for name in filters.SHALLOW_FILTERS},
            **{name: _paid(known[name], Meter.weigh) for name in filters.DEEP_FILTERS},
            **{name: _metered(function) for name, function in filters.OWN_FILTERS.items()},
            " step": _step,
            " weigh": _weigh,
            " scan": _scan,
            " concat": _concat,
        }
        tests = self.tests
        self.tests = {
            **{name: function or tests[name] for name, function in filters.LIGHT_TESTS.items()},
            **{name: _paid(tests[name], Meter.weigh) for name in filters.DEEP_TESTS},
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise SecurityError(f"it has more than {MAX_SOURCE} characters")
        return price(super()._parse(source, name, filename))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """What stands behind a dot: one of ``METHODS``, or an entry of a dictionary or namespace."""
        kind = type(obj)
        if attribute in METHODS.get(kind, ()):
            return getattr(obj, attribute)
        if kind is dict and attribute in obj:
            return obj[attribute]
        if kind is Namespace or isinstance(obj, Undefined):
            if not attribute.startswith("_"):
                return getattr(obj, attribute, self.undefined(obj=obj, name=attribute))
        elif not hasattr(kind, attribute) and not attribute.startswith("_"):
            return self.undefined(obj=obj, name=attribute)
        raise SecurityError(f"{attribute!r} of {kind.__name__!r} is out of bounds for a template")

    def getitem(self, obj: Any, argument: Any) -> Any:
        """What stands in brackets."""
        if type(argument) is tuple:
            raise SecurityError("a tuple can't be a key")
        if type(obj) in METHODS or isinstance(obj, range | Undefined):
            try:
                return obj[argument]
            except (TypeError, LookupError):
                pass
        return self.getattr(obj, argument) if isinstance(argument, str) else self.undefined(obj=obj, name=argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call of what a template may have got hold of."""
        meter: Meter = __context.parent[METER]
        meter.take(1)
        named = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}  # jinja's
        if isinstance(__obj, BuiltinMethodType | MethodType):
            meter.weigh([args, named])
            owner, name = __obj.__self__, __obj.__name__
            if name not in METHODS.get(type(owner), ()):
                raise SecurityError(f"{name!r} can't be called")
            if isinstance(owner, str):
                return _text_method(meter, owner, name, args, named)
            if isinstance(owner, list | tuple):
                meter.weigh(owner)
            return __obj(*args, **named)
        if isinstance(__obj, LoopContext):
            _shallow(meter, args)
            _shallow(meter, args[0] if args else ())
        elif any(__obj is function for function in __self._functions):
            meter.weigh([args, named])
        elif not isinstance(__obj, Macro | Undefined):
            raise SecurityError(f"{type(__obj).__name__!r} can't be called")
        return __context.call(__obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operation on two values, none of which makes more than is paid for."""
        meter: Meter = context.parent[METER]
        if type(left) is str and type(right) is str and operator == "+":
            meter.size(len(left) + len(right))
            return left + right
        meter.take(1)
        for value in (left, right):
            if isinstance(value, int) and value.bit_length() > MAX_BITS:
                raise SecurityError(f"a number of more than {MAX_BITS} bits")
        if operator == "%" and isinstance(left, str):
            return meter.format(left, right)
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64):
            raise SecurityError("a power of more than 64")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str) and isinstance(times, int):
                    meter.size(len(value) * max(times, 0))
                elif isinstance(value, list | tuple) and isinstance(times, int):
                    meter.take(len(value) * max(times, 0) >> ITEMS)
        elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            meter.take((len(left) + len(right)) >> ITEMS)
        return super().call_binop(context, operator, left, right)


def _text_method(meter: Meter, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name == "join":
        (items,) = args
        return meter.join([item if isinstance(item, str) else _no_text(item) for item in items], text)
    if name == "replace":
        return meter.replace(text, *args, **kwargs)
    if name in ("split", "rsplit", "splitlines"):
        on = args[0] if args and name != "splitlines" else None
        meter.take(text.count(on) if isinstance(on, str) and on else len(text) >> ITEMS)
    if name.endswith("strip") and args and isinstance(args[0], str) and len(args[0]) > filters.MAX_STRIPPED:
        raise SecurityError(f"more than {filters.MAX_STRIPPED} characters to strip")
    meter.size(len(text))
    return getattr(text, name)(*args, **kwargs)


def _no_text(item: Any) -> str:
    raise TypeError(f"expected a text to join, not {type(item).__name__!r}")


def _light(meter: Meter, value: Any) -> None:
    meter.take(1)


def _shallow(meter: Meter, value: Any) -> None:
    """Pay for the items of a value, whatever they hold."""
    meter.take(1 + (len(value) >> ITEMS if hasattr(value, "__len__") else 0))


def _paid(function: Any, pay: Callable[[Meter, Any], None]) -> Any:
    """One of jinja's filters or tests that is paid for; one that yields gives a list."""
    passes = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def paid(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter: Meter = context.parent[METER]
        pay(meter, value)
        meter.weigh([args, kwargs])
        given: dict[str, tuple[Any, ...]] = {"context": (context,), "environment": (context.environment,)}
        given["eval_context"] = (context.eval_ctx,)
        result = function(*given.get(passes.name, ()) if passes else (), value, *args, **kwargs)
        if not hasattr(result, "__next__"):
            return result
        items: list[Any] = []
        while more := list(islice(result, 1 << ITEMS)):
            meter.take(1)
            items += more
        return items

    return paid


def _metered(function: Any) -> Any:
    """A filter of our own, which is handed the meter and the environment."""

    @pass_context
    def metered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter: Meter = context.parent[METER]
        meter.weigh([args, kwargs])
        return function(meter, context.environment, value, *args, **kwargs)

    return metered


@pass_context
def _finalize(context: Context, value: Any) -> str:
    return cast(Meter, context.parent[METER]).text(value)


@pass_context
def _step(context: Context, steps: int) -> bool:
    context.parent[METER].take(steps)
    return True


@pass_context
def _weigh(context: Context, value: Any) -> Any:
    context.parent[METER].weigh(value)
    return value


@pass_context
def _scan(context: Context, value: Any) -> Any:
    """Pay for one look at each item, or at each character."""
    meter: Meter = context.parent[METER]
    if isinstance(value, str):
        meter.size(len(value))
    else:
        _shallow(meter, value)
    return value


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    meter: Meter = context.parent[METER]
    return meter.join([meter.text(value) for value in values])
