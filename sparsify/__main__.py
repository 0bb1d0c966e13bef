"""The command `sparsify`: version, what searches gradients on this machine, each method in a line, or one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import sparsify
from sparsify.core.checks import DISTRIBUTION, THEIRS

NOBODY_READS = 141  # as a shell counts a program that SIGPIPE ended


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    try:
        code = _told(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `sparsify | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        return NOBODY_READS


def _told(words: Sequence[str] | None) -> int:
    if not hasattr(sparsify, "names"):  # theirs was installed over ours, or removed from it
        print(
            f"`import sparsify` does not find {DISTRIBUTION}, whose command this is, but what another "
            f"project left there; `pip uninstall {THEIRS} {DISTRIBUTION}`, then install {DISTRIBUTION} again",
            file=sys.stderr,
        )
        return 2
    parser = argparse.ArgumentParser("sparsify", description=f"{__doc__.partition(': ')[2].capitalize()}")
    parser.add_argument("method", nargs="?", help="explain this one, with its hyperparameters")
    parser.add_argument("--version", action="version", version=f"{DISTRIBUTION} {sparsify.__version__}")
    if method := parser.parse_args(words).method:
        try:
            print(*explained(method), sep="\n")
        except ValueError as error:
            print(f"sparsify: {error}", file=sys.stderr)
            return 2
        return 0
    print(f"{DISTRIBUTION} {sparsify.__version__}", *machine(), "", *methods(), sep="\n")
    return 0


def machine() -> Iterator[str]:
    """Lines on what selects here. A first call may take seconds, in which kernels are compiled."""
    if find_spec("torch") is None:
        yield "PyTorch is not installed here, so methods can be listed, but not built: pip install torch"
        return
    import torch

    from sparsify.kernels import native, native_unavailable_reason, triton_unavailable_reason

    yield f"PyTorch {torch.__version__}"
    why = native_unavailable_reason()
    kernel = f"torch.topk, slower than C++: {why}" if why else f"C++ ({native.best_vector_level()})"
    yield f"on the CPU selects {kernel}"
    for number in range(torch.cuda.device_count()):
        why = triton_unavailable_reason(torch.device("cuda", number))
        kernel = f"torch.topk, slower than Triton: {why}" if why else "Triton"
        yield f"on {torch.cuda.get_device_name(number)} selects {kernel}"


def methods() -> Iterator[str]:
    """Each, with the first sentence about it, or why its file can't be read."""
    from sparsify.methods import REGISTRY

    for name in REGISTRY.names():
        about = REGISTRY.why_broken(name) or REGISTRY.summary(name).partition(". ")[0]
        yield f"{name:<13} {about}"


def explained(method: str) -> Iterator[str]:
    """Lines on one method.

    Raises:
        ValueError: there is none of this name, or its file can't be read.
    """
    from sparsify.core.spec import REQUIRED
    from sparsify.methods import REGISTRY
    from sparsify.ranges import describe_type

    REGISTRY.check_name(method)
    parameters = REGISTRY.parameters(method)
    needed = [f"{name}=..." for name, each in parameters.items() if each.default == REQUIRED]
    yield f"sparsify.{method}({', '.join(needed)})\n"
    yield f"{REGISTRY.docstring(method)}\n"
    for name, each in parameters.items():
        default = "" if each.default == REQUIRED else f"={each.default!r}"
        yield f"{name}{default}  [{describe_type(each.allowed)}]"


if __name__ == "__main__":
    sys.exit(main())
