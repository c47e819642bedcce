"""The flow interface: a decode-time sparse-attention algorithm for one request and one KV head."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from kvsieve.budget import Budget
from kvsieve.dtypes import default_dtype
from kvsieve.errors import ConfigError, FlowError, Location, UnknownName
from kvsieve.flow_file import import_file
from kvsieve.flow_names import no_such_class, refuse_misspelt
from kvsieve.mass import FIELDS as MASS_FIELDS
from kvsieve.mass import AttentionMass
from kvsieve.retention import Evict

BUILTIN_FIELDS = ("k", "v", "position", "age")
"""Fields every flow can read in ``score``: K [W, p, D], V [W, p, Dv], position [W], age [W]."""

DEFAULT_PAGE_SIZE = 16
"""Tokens per page where neither the user nor the flow names a number."""

ScoreResult = torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor]]


class PageFields(Mapping[str, torch.Tensor]):
    """The read-only mapping that ``score`` receives: field name to tensor ``[W, *shape]``."""

    def __init__(self, fields: Mapping[str, torch.Tensor]) -> None:
        self._fields = dict(fields)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._fields and name in MASS_FIELDS:
            raise ConfigError(f"reads pages[{name!r}] without attention mass: set mass = AttentionMass() in the class")
        if name not in self._fields:
            raise UnknownName("page field", name, self._fields)
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class Flow:
    """Base class of all flows. Subclass it and define what the algorithm needs; every method is optional.

    ``summarize(self, k [p, D], v [p, Dv]) -> {name: tensor}``
        A pure function of one full page; runs once, when the page is full. Names, shapes and dtypes of the summary
        fields come from tracing it. A floating field is stored in K's dtype, unless ``summary_dtypes`` names another.
    ``init_state(self, page_size, head_dim) -> {name: tensor}``
        The value a page's state starts from, dtype included. State belongs to (request, page, KV head).
    ``score(self, q [G, D], pages) -> scores [W]`` or ``(scores, {name: new state [W, ...]})``
        Runs at every decode step that needs it, over the ``W`` window pages. ``pages`` is read-only and maps ``k``,
        ``v``, every summary and state field, ``position`` (of each page's first token) and ``age`` (tokens since its
        last one; both floating point, exact below 2**24 in float32). With ``mass``, ``pages["mass"]`` [W, p] is the
        attention that each token has received and ``pages["mass_sum"]`` [W] its sum. Parameters called ``layer`` and
        ``scale`` receive the layer index and the attention scale. Without ``score`` only sink and recent pages are
        attended.

    Everything floating is float32 inside a flow (float64 in the reference). Tensors held by the flow are constants.
    """

    name: ClassVar[str] = ""
    page_size: ClassVar[int | None] = None
    """A page size that the flow requires; None: any."""
    evictable: ClassVar[bool] = False
    """Whether the flow's mass alone, or without mass the age of tokens, may say which tokens are evicted."""
    equal_widths: ClassVar[bool] = False
    """Whether the flow needs values as wide as keys."""
    summary_dtypes: ClassVar[Mapping[str, torch.dtype]] = types.MappingProxyType({})
    """Storage dtypes of summary fields that should not follow K's dtype."""
    mass: AttentionMass | None = None
    """Attention mass that the runtime keeps for ``score``, an attribute or a property; None: none."""

    summarize: ClassVar[Callable[..., Mapping[str, torch.Tensor]] | None] = None
    init_state: ClassVar[Callable[..., Mapping[str, torch.Tensor]] | None] = None
    score: ClassVar[Callable[..., ScoreResult] | None] = None

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in vars(self).items() if not key.startswith("_"))
        return f"{type(self).__name__}({arguments})"


SCHEMES = {"vortex": "kvsieve.compat.vortex.bridge"}
"""Registries of other flow systems: ``scheme:name`` is looked up in the module, with its ``registered(name)``."""

FlowT = TypeVar("FlowT", bound=type[Flow])
_REGISTRY: dict[str, type[Flow]] = {}


def register(name: str) -> Callable[[FlowT], FlowT]:
    """Class decorator: makes a flow available to :func:`build_flow`, the CLI and every check under ``name``.

    Raises:
        ConfigError: not a Flow subclass, or the name belongs to another class.
    """

    def add(cls: FlowT) -> FlowT:
        if not (isinstance(cls, type) and issubclass(cls, Flow)):
            raise ConfigError(f"register({name!r}): expected a subclass of Flow, received {cls!r}")
        known = _REGISTRY.get(name)
        # The same source line executed again (a reloaded file or notebook cell) replaces itself.
        if known is not None and (source_file(known), known.__qualname__) != (source_file(cls), cls.__qualname__):
            raise ConfigError(
                f"register({name!r}): the name belongs to {known.__qualname__} of {source_file(known)}, and "
                f"{cls.__qualname__} of {source_file(cls)} asks for it too; choose another name"
            )
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return add


def list_flows() -> dict[str, type[Flow]]:
    """Registered flows, by name."""
    import kvsieve.flows  # noqa: F401  (importing the package registers the shipped flows)

    return dict(sorted(_REGISTRY.items()))


def build_flow(name: str, **arguments: Any) -> Flow:
    """Build a registered flow by name.

    ``vortex:name`` is a flow that was registered with vortex_torch's ``register``; the prefix may be left out for
    names that no flow of kvsieve has.

    Raises:
        UnknownName: no such flow; the near names are listed.
        ConfigError: arguments the constructor does not take, or values it refuses.
    """
    if not isinstance(name, str):
        raise ConfigError(f"flow: expected a registered name, received {name!r}")
    flows = list_flows()
    return instantiate(flows[name] if name in flows else _foreign_flow(name, flows), arguments)


def _foreign_flow(name: str, flows: Mapping[str, type[Flow]]) -> type[Flow]:
    """A flow of another flow system's registry, by ``scheme:name`` or by its bare name."""
    known = list(flows)
    scheme, colon, bare = name.rpartition(":")
    for one, module_name in SCHEMES.items():
        if not colon or one == scheme:
            module = importlib.import_module(module_name)
            names: list[str] = module.registered_names()
            known += names
            if f"{one}:{bare}" in names:
                found: type[Flow] = module.registered(bare)
                return found
    raise UnknownName("flow", name, known)


def load_flow(spec: str, **arguments: Any) -> Flow:
    """Build a flow from a registered name or from ``path/to/file.py:ClassName``.

    The class may also be one of another flow system that says, in ``__kvsieve_flow__()``, which Flow class it is; a
    file that imports vortex_torch gets the layer that provides it (:mod:`kvsieve.compat.vortex`).

    Raises:
        UnknownName: no such flow, or no such class in the file.
        ConfigError: the file does not exist or does not import; arguments that the constructor refuses.
    """
    if not isinstance(spec, str):
        raise ConfigError(f"flow: expected a registered name or file.py:ClassName, received {spec!r}")
    path, colon, class_name = spec.rpartition(":")
    if not colon or path in SCHEMES:
        if spec.endswith(".py"):
            raise ConfigError(f"flow {spec!r}: expected file.py:ClassName, received a file without a class name")
        return build_flow(spec, **arguments)
    module = import_file(Path(path))
    found = {key: _flow_of(value, module) for key, value in vars(module).items()}
    classes = {key: value for key, value in found.items() if value is not None}
    if class_name not in classes:
        raise no_such_class(module, path, class_name, classes)
    return instantiate(classes[class_name], arguments)


def shown_parameters(signature: inspect.Signature) -> str:
    """A constructor's parameters as its source shows them: ``(decay: float = 0.9)``."""
    parameters = ", ".join(str(parameter).replace("'", "") for parameter in signature.parameters.values())
    return f"({parameters})"


def instantiate(cls: type[Flow], arguments: Mapping[str, Any]) -> Flow:
    """Call a flow's constructor; a wrong argument becomes one clear :class:`ConfigError`."""
    signature, flow = inspect.signature(cls), f"flow {cls.name or cls.__name__}"
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{flow}: {error}; its arguments are {shown_parameters(signature)}; in a command: --flow-arg NAME=VALUE"
        ) from None
    for key, value in arguments.items():
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(f"{flow}: {key}: expected a number, received NaN")
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ConfigError(f"{flow}: {error}") from error
    except TypeError as error:  # what Python says of a comparison with text names neither argument nor value
        raise ConfigError(f"{flow}: {error}; received {dict(arguments)}") from error


def flow_name(flow: Flow) -> str:
    """The name a flow is registered under, or that of its class."""
    return flow.name or type(flow).__name__


def choose_page_size(flow: Flow, wanted: int | None) -> int:
    """The page size asked for, or the flow's own, or 16."""
    return wanted if wanted is not None else flow.page_size or DEFAULT_PAGE_SIZE


def check_flow(flow: Flow, page_size: int, budget: Budget) -> None:
    """Refuse a page size or budget that the flow cannot honour.

    Raises:
        ConfigError: with expected, received and the remedy.
    """
    check_page_size(flow, page_size)
    name = flow_name(flow)
    if flow.score is None and (budget.topk or budget.ratio):
        raise ConfigError(
            f"flow {name} has no score and attends sink and recent pages only: expected topk=0 and ratio=0, received "
            f"topk={budget.topk} ratio={budget.ratio}; give these pages to recent instead"
        )


def check_page_size(flow: Flow, page_size: int) -> None:
    """Refuse a page size that is none, or that the flow cannot honour; and a mass that is none.

    Raises:
        ConfigError: with expected and received.
    """
    name = flow_name(flow)
    refuse_misspelt(flow)
    if not isinstance(page_size, int) or page_size < 1:
        raise ConfigError(f"flow {name}: page_size: expected an integer >= 1, received {page_size!r}")
    if flow.page_size is not None and flow.page_size != page_size:
        raise ConfigError(f"flow {name} requires page_size {flow.page_size}, received {page_size}")
    if flow.mass is not None and not isinstance(flow.mass, AttentionMass):
        raise ConfigError(f"flow {name}: mass: expected an AttentionMass or None, received {flow.mass!r}")


def check_evicting(flow: Flow, page_size: int, retention: Evict, dense_layers: Collection[int]) -> None:
    """Refuse a flow that cannot say which tokens to evict, a wrong page size, and layers that would evict nothing.

    Raises:
        ConfigError: with expected, received and the remedy.
    """
    check_page_size(flow, page_size)
    name = flow_name(flow)
    if dense_layers:
        raise ConfigError(
            f"expected no dense layers where tokens are evicted (a token has one place in all layers), received "
            f"{sorted(dense_layers)}; use retention Keep() with a budget"
        )
    if not flow.evictable:
        able = [one for one, cls in list_flows().items() if cls.evictable]
        raise ConfigError(
            f"flow {name}: expected one that may evict by attention mass alone ({', '.join(able)}, or a class with "
            f"evictable = True), received one that ranks pages by score; use retention Keep() with a budget"
        )
    if flow.mass is None and retention.capacity != retention.sink + retention.recent:
        raise ConfigError(
            f"flow {name} has no attention mass and keeps sink and recent tokens only: expected capacity = sink + "
            f"recent, received {retention}; set recent={retention.capacity - retention.sink}"
        )


def initial_state(flow: Flow, page_size: int, head_dim: int) -> Mapping[str, torch.Tensor]:
    """What a page's state starts from, as it is stored: float32 where the flow says nothing. Empty without state."""
    if flow.init_state is None:
        return {}
    with default_dtype(torch.float32):
        return flow.init_state(page_size, head_dim)


def with_dtype(flow: Flow, dtype: torch.dtype) -> Flow:
    """A copy of the flow whose floating tensors (its constants) are cast to ``dtype``."""

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, dict):
            return {key: cast(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(cast(item) for item in value)
        if isinstance(value, torch.nn.Module):
            return copy.deepcopy(value).to(dtype)
        return value

    twin = copy.copy(flow)
    for key, value in vars(flow).items():
        object.__setattr__(twin, key, cast(value))
    return twin


_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class DoublePrecision(TorchFunctionMode):
    """While entered, a flow's methods compute in float64: what they make in, or cast to, float32 is float64 instead.

    Without it, the ``.float()`` or ``torch.eye(n)`` of a flow would round, or fail, among the reference's tensors.
    """

    def __enter__(self) -> DoublePrecision:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def widen(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dtype in _NARROW:
                return value.to(torch.float64)  # a constant of a module or class, which with_dtype does not see
            if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
                return type(value)(map(widen, value))
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(widen, args), **{key: widen(value) for key, value in (kwargs or {}).items()})


def extra_parameters(flow: Flow) -> frozenset[str]:
    """Which of ``layer`` and ``scale`` the flow's ``score`` asks for.

    Raises:
        FlowError: a parameter with another name.
    """
    if flow.score is None:
        return frozenset()
    parameters = list(inspect.signature(flow.score).parameters.values())
    wanted = frozenset(parameter.name for parameter in parameters[2:] if parameter.default is parameter.empty)
    wanted |= frozenset(parameter.name for parameter in parameters[2:] if parameter.name in ("layer", "scale"))
    if len(parameters) < 2 or not wanted <= {"layer", "scale"}:
        raise FlowError(
            f"{type(flow).__name__}.score",
            f"expected the parameters (q, pages) and optionally layer and scale, received "
            f"({', '.join(parameter.name for parameter in parameters)})",
            "make other numbers constructor arguments",
            definition_of(flow, "score"),
        )
    return wanted


def source_file(cls: type) -> str:
    """File that defines a class, or its module's name when there is none (a notebook, a REPL)."""
    try:
        return inspect.getsourcefile(cls) or cls.__module__
    except (OSError, TypeError):
        return cls.__module__


def definition_of(flow: Flow, method: str) -> Location | None:
    """Where a method of the flow is defined."""
    code = getattr(getattr(type(flow), method, None), "__code__", None)
    return Location(code.co_filename, code.co_firstlineno) if code else None


def _flow_of(value: object, module: types.ModuleType) -> type[Flow] | None:
    """The Flow class that a name of a flow file stands for; None: it is no flow, or one of another file."""
    if not isinstance(value, type) or value.__module__ != module.__name__:
        return None
    if issubclass(value, Flow):
        return value
    convert: Callable[[], type[Flow]] | None = getattr(value, "__kvsieve_flow__", None)
    return convert() if convert is not None else None
