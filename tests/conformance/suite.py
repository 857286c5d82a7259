"""The tests inside the torch wheel that concern DistributedDataParallel."""

import ast
import functools
import importlib
import inspect
import os
import re
import sys
import textwrap
import types
from dataclasses import dataclass

import cpu_shim

PACKAGE = "torch.testing._internal.distributed"
CLASS_NAME = "DistributedDataParallel"
DEFAULT_WORLD_SIZE = 2

# The first pattern found in a test's name decides its category.
CATEGORIES = {
    "distributed autograd (RPC)": r"^Ddp|^CudaDdp|^RpcTest",
    "sync batch norm": r"SyncBatchNorm|sync_bn",
    "join, uneven inputs": r"join|uneven",
    "logging data": r"logging_data|comm_hook_logging|error_logged",
    "profiling": r"profiling",
    "torch.compile, functional API": r"compile|stateless",
    "mixed precision": r"mixed_precision|with_amp",
    "optimizer fused with backward": r"optim_in_backward|hook_with_optimizer",
    "local SGD, model averaging": r"post_localSGD_optimizer",
    "process group, device mesh": r"update_process_group|device_mesh",
    "accumulation, no_sync": r"no_sync",
    "communication hooks": r"hook_parity|hook_pickling|allreduce_hook",
    "buffers": r"buffer",
    "static graph": r"static|different_graph",
    "unused parameters, control flow": r"unused|control_flow|undefined_grad|has_finalized",
    "ignored parameters": r"ignore_params|data_parallel_params",
    "checks across ranks": r"verify_model|model_diff|sync_module_states",
    "bucketing": r"bucket",
    "debug names": r"debug_param",
    "inputs and outputs": r"namedtuple|ddp_device|new_tensor|no_grad|zero_output",
    "core training": r"",
}

# Tests that reload the model in mid-training where they can, and must not: torch's
# own class, with a static graph, no longer reduces gradients after that.
NEVER_RELOADED = {"test_DistributedDataParallel"}
# Tests that torch.compile fails, by compiling once more than they allow.
NEVER_COMPILED = {
    "test_ddp_update_process_group_default_group",
    "test_ddp_update_process_group_new_group",
}

# Attributes without an underscore that torch's class has for itself all the same.
UNDOCUMENTED = {
    "reducer",
    "logger",
    "parameters_to_ignore",
    "broadcast_bucket_size",
    "bucket_bytes_cap",
    "bucket_bytes_cap_list",
}
# What torch's reducer emits to a profiler.
UNDOCUMENTED_EVENTS = {"search_unused_parameters"}


@dataclass(frozen=True)
class Case:
    name: str
    test_class: type
    method: str
    category: str
    kind: str
    world_size: int | None = None  # None where any will do
    exact_world_size: bool = False
    own_process_group: bool = False  # the test makes the default group itself
    internal_names: tuple = ()  # what makes a test internal
    logging_fields: tuple = ()  # what it reads of the logging data
    private_helpers: tuple = ()  # private functions of torch.distributed that it calls
    needs_gpu: bool = False
    skipped_upstream: str = ""
    disabled_upstream: bool = False

    def processes(self, asked_for):
        """How many processes to run the test with, where the caller asked for so many."""
        if self.exact_world_size:
            return self.world_size
        return max(self.world_size or 0, asked_for)


# --- loading ----------------------------------------------------------------


def load():
    """Imports the test modules, their skips noted rather than made."""
    os.environ["BACKEND"] = "gloo"
    os.environ["WORLD_SIZE"] = str(DEFAULT_WORLD_SIZE)
    # Any file will do: with one the tests also save and load in mid-training.
    os.environ["INIT_METHOD"] = "file:///dev/null"
    with cpu_shim.gates_open():
        names = ("distributed_test", "ddp_under_dist_autograd_test", "rpc.rpc_test")
        return [importlib.import_module(f"{PACKAGE}.{name}") for name in names]


def _disabled_sources(class_node):
    """Tests that the class carries, commented out, as string literals."""
    for node in class_node.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and "def test_" in str(node.value.value):
            yield textwrap.dedent(node.value.value)


def _functions(body):
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


@functools.cache
def _syntax_of(module):
    return ast.parse(inspect.getsource(module))


def _class_node(module, cls):
    """The syntax of ``cls``, a class of ``module``."""
    body = _syntax_of(module).body
    for name in cls.__qualname__.split("."):
        node = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == name)
        body = node.body
    return node


# --- what a test touches ----------------------------------------------------


class Syntax:
    """The functions and classes that a test can reach by name."""

    def __init__(self, methods, module):
        from torch.testing._internal import common_distributed

        self.module = module
        self.methods = methods
        self.helpers = {
            node.name: node
            for source in (common_distributed, module)
            for node in _syntax_of(source).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not _holds_tests(node)
        }

    def reached_from(self, method):
        """Every piece of ``method`` and of all that it calls, within the tests."""
        parts, waiting, seen = [], [self.methods[method]], set()
        while waiting:
            node = waiting.pop()
            if node is None or node.name in seen:
                continue
            seen.add(node.name)
            for part in ast.walk(node):
                parts.append(part)
                if isinstance(part, ast.Attribute) and _is_self(part.value):
                    waiting.append(self.methods.get(part.attr))
                elif isinstance(part, ast.Name):
                    waiting.append(self.helpers.get(part.id))
        return parts


def _holds_tests(node):
    return any(name.startswith("test_") for name in _functions(node.body))


def _is_self(node):
    return isinstance(node, ast.Name) and node.id == "self"


def _mentions_class(parts):
    return any(getattr(part, "attr", None) == CLASS_NAME or getattr(part, "id", None) == CLASS_NAME for part in parts)


@functools.cache
def _names_private_to_torch():
    """Underscored names that torch's class, its module, reducer or logger define."""
    import torch.distributed as dist
    from torch.distributed.algorithms import join
    from torch.nn.parallel import distributed

    names = set(dir(dist.Reducer)) | set(dir(dist.Logger))
    names |= set(vars(distributed.DistributedDataParallel))
    names |= {
        name for name, value in vars(distributed).items() if getattr(value, "__module__", None) == distributed.__name__
    }
    names |= {
        node.attr
        for module in (distributed, join)
        for node in ast.walk(_syntax_of(module))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return {n for n in names if n.startswith("_") and not n.startswith("__")}


def _internal_names(parts, private):
    found = set()
    for part in parts:
        if isinstance(part, ast.Attribute) and not _is_self(part.value):
            if part.attr in private or part.attr in UNDOCUMENTED:
                found.add(part.attr)
        elif isinstance(part, ast.Name) and part.id in private:
            found.add(part.id)
        elif isinstance(part, ast.Constant) and part.value in UNDOCUMENTED_EVENTS:
            found.add(part.value)
    return tuple(sorted(found))


def _logging_fields(parts):
    """Keys read from what ``_get_ddp_logging_data`` returns."""
    found = set()
    for part in parts:
        is_get = isinstance(part, ast.Call) and getattr(part.func, "attr", "") == "get"
        if is_get and "logging_data" in ast.unparse(part.func.value) and part.args:
            found.add(part.args[0].value)
    return tuple(sorted(found))


def _private_helpers(parts, module, private):
    """Private functions from elsewhere in torch: a class need not define them."""
    found = set()
    for part in parts:
        if isinstance(part, ast.Name):
            origin = getattr(vars(module).get(part.id), "__module__", None) or ""
            if part.id.startswith("_") and origin.startswith("torch.distributed"):
                found.add(part.id)
        elif isinstance(part, ast.Attribute) and part.attr.startswith("_"):
            if ast.unparse(part.value) == "dist":
                found.add(part.attr)
    return tuple(sorted(found - private))


# --- the cases --------------------------------------------------------------


def cases(modules):
    """Every test that mentions the class, and so might use it."""
    distributed, under_autograd, rpc = modules
    found = _cases_of_distributed_test(distributed)
    found += _cases_of_rpc(under_autograd, "DdpUnderDistAutogradTest")
    found += _cases_of_rpc(under_autograd, "DdpComparisonTest")
    found += _cases_of_rpc(under_autograd, "CudaDdpComparisonTest")
    found += _cases_of_rpc(rpc, "RpcTest")
    return found


def _cases_of_distributed_test(module):
    from torch.testing._internal.common_utils import instantiate_parametrized_tests

    base = module.DistributedTest._DistTestBase
    node = _class_node(module, base)
    methods = _functions(node.body)
    disabled, namespace = {}, {}
    for source in _disabled_sources(node):
        disabled |= _functions(ast.parse(source).body)
        with cpu_shim.gates_open():
            exec(compile(source, f"<disabled in {module.__name__}>", "exec"), vars(module), namespace)

    revived = {name: namespace[name] for name in disabled}
    test_class = type("DistributedTests", (module.TestDistBackend, base), revived)
    test_class.__module__ = module.__name__
    instantiate_parametrized_tests(test_class)

    syntax = Syntax(methods | disabled, module)
    written = {name for name in syntax.methods if name.startswith("test_")}
    return [
        _case(method, test_class, method, source, syntax, disabled_upstream=source in disabled)
        for method in sorted(n for n in dir(test_class) if n.startswith("test_"))
        for source in [_written_as(method, written)]
        if source and _mentions_class(syntax.reached_from(source))
    ]


def _written_as(method, written):
    """The name in the source of a test, which parameters may have lengthened."""
    return max((name for name in written if method.startswith(name)), key=len, default=None)


def _cases_of_rpc(module, class_name):
    from torch.testing._internal.common_distributed import MultiProcessTestCase
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
        TensorPipeRpcAgentTestFixture,
    )

    base = getattr(module, class_name)
    test_class = type(class_name, (base, TensorPipeRpcAgentTestFixture, MultiProcessTestCase), {})
    test_class.__module__ = module.__name__
    syntax = Syntax(_functions(_class_node(module, base).body), module)
    return [
        _case(
            f"{class_name}.{method}",
            test_class,
            method,
            method,
            syntax,
            world_size=test_class(method).world_size,
            exact_world_size=True,
            own_process_group=True,
        )
        for method in sorted(syntax.methods)
        if method.startswith("test_") and _mentions_class(syntax.reached_from(method))
    ]


def _case(name, test_class, method, source, syntax, **given):
    parts = syntax.reached_from(source)
    private = _names_private_to_torch()
    internal = _internal_names(parts, private)
    function = getattr(test_class, method)
    given.setdefault("world_size", _wanted_world_size(function))
    return Case(
        name,
        test_class,
        method,
        category=next(c for c, pattern in CATEGORIES.items() if re.search(pattern, name)),
        kind="internal" if internal else "behaviour",
        internal_names=internal,
        logging_fields=_logging_fields(parts),
        private_helpers=_private_helpers(parts, syntax.module, private),
        needs_gpu=getattr(function, cpu_shim.NEEDS_GPU, False),
        skipped_upstream="; ".join(getattr(function, cpu_shim.SKIP_REASONS, ())),
        **given,
    )


def _wanted_world_size(function):
    return getattr(function, cpu_shim.WANTED_PROCESSES, None)


# --- the class under test ---------------------------------------------------

# Private names that go with torch's class.  Where the module of another class
# defines one too, the tests are given that one.
COMPANIONS = ("_MixedPrecision", "_BufferCommHookLocation")
# What torch.compile asks torch's class for, and another class only if it has it too.
ACTIVE_MODULE = "_get_active_ddp_module"


def substitute(implementation):
    """Puts ``implementation`` wherever torch's own class is looked up."""
    from torch.nn.parallel import distributed

    own_module = sys.modules[implementation.__module__]
    _replace(distributed.DistributedDataParallel, implementation, own_module)
    for name in COMPANIONS:
        if hasattr(own_module, name):
            _replace(getattr(distributed, name), getattr(own_module, name), own_module)


def _replace(original, replacement, own_module):
    if original is replacement:
        return
    own_package = own_module.__name__.partition(".")[0]
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType) or module.__name__.partition(".")[0] == own_package:
            continue
        if module.__name__.startswith("torch._dynamo.") and not hasattr(replacement, ACTIVE_MODULE):
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, replacement)
