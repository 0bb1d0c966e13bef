"""The command `sparsify`: show the version, the kernels of this machine and all methods, or one method."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import sparsify
from sparsify.core.checks import DISTRIBUTION, OTHER_DISTRIBUTION

BROKEN_PIPE_CODE = 141  # of programs that SIGPIPE ended, in shells


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `sparsify | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards buffered output
        return BROKEN_PIPE_CODE


def _run(arguments: Sequence[str] | None) -> int:
    if not hasattr(sparsify, "names"):  # another project of this name was installed over ours, or removed
        print(
            f"`import sparsify` does not find {DISTRIBUTION}, whose command this is, but what another "
            f"project left there; `pip uninstall {OTHER_DISTRIBUTION} {DISTRIBUTION}`, then install "
            f"{DISTRIBUTION} again",
            file=sys.stderr,
        )
        return 2
    parser = argparse.ArgumentParser("sparsify", description=f"{__doc__.partition(': ')[2].capitalize()}")
    parser.add_argument("method", nargs="?", help="a method to explain, with its hyperparameters")
    parser.add_argument("--version", action="version", version=f"{DISTRIBUTION} {sparsify.__version__}")
    method = parser.parse_args(arguments).method
    if method:
        try:
            print(*_explain_method(method), sep="\n")
        except ValueError as error:
            print(f"sparsify: {error}", file=sys.stderr)
            return 2
        return 0
    print(f"{DISTRIBUTION} {sparsify.__version__}", *_describe_kernels(), "", *_list_methods(), sep="\n")
    return 0


def _describe_kernels() -> Iterator[str]:
    """Yield lines about the kernels of this machine. A first call may compile them for some seconds."""
    if find_spec("torch") is None:
        yield "PyTorch is not installed here, so methods can be listed, but not built: pip install torch"
        return
    import torch

    from sparsify.kernels import native, native_unavailable_reason, triton_unavailable_reason

    yield f"PyTorch {torch.__version__}"
    reason = native_unavailable_reason()
    kernel = f"torch.topk, slower than C++: {reason}" if reason else f"C++ ({native.best_vector_level()})"
    yield f"on the CPU selects {kernel}"
    for number in range(torch.cuda.device_count()):
        reason = triton_unavailable_reason(torch.device("cuda", number))
        kernel = f"torch.topk, slower than Triton: {reason}" if reason else "Triton"
        yield f"on {torch.cuda.get_device_name(number)} selects {kernel}"


def _list_methods() -> Iterator[str]:
    """Yield a line for each method: the first sentence about it, or the reason why its file can't be read."""
    from sparsify.methods import REGISTRY

    for name in REGISTRY.names():
        sentence = REGISTRY.reason_unreadable(name) or REGISTRY.summary(name).partition(". ")[0]
        yield f"{name:<13} {sentence.removesuffix('.')}"


def _explain_method(method: str) -> Iterator[str]:
    """Yield lines about one method and its hyperparameters.

    Raises:
        ValueError: there is no method of this name, or its file can't be read.
    """
    from sparsify.core.spec import REQUIRED
    from sparsify.methods import REGISTRY
    from sparsify.ranges import describe_type

    REGISTRY.check_name(method)
    parameters = REGISTRY.parameters(method)
    required = [f"{name}=..." for name, parameter in parameters.items() if parameter.default == REQUIRED]
    yield f"sparsify.{method}({', '.join(required)})\n"
    yield f"{REGISTRY.docstring(method)}\n"
    for name, parameter in parameters.items():
        default = "" if parameter.default == REQUIRED else f"={parameter.default!r}"
        yield f"{name}{default}  [{describe_type(parameter.allowed)}]"


if __name__ == "__main__":
    sys.exit(main())
