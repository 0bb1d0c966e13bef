"""The command `sparsify`: version, what searches gradients on this machine, each method in a line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec

import sparsify
from sparsify.core.checks import DISTRIBUTION, THEIRS


def main() -> int:
    """Returns the exit code."""
    if not hasattr(sparsify, "names"):  # theirs was installed over ours, or removed from it
        print(
            f"`import sparsify` does not find {DISTRIBUTION}, whose command this is, but what another "
            f"project left there; `pip uninstall {THEIRS} {DISTRIBUTION}`, then install {DISTRIBUTION} again",
            file=sys.stderr,
        )
        return 2
    print(f"{DISTRIBUTION} {sparsify.__version__}", *machine(), "", *methods(), sep="\n")
    return 0


def machine() -> Iterator[str]:
    """Lines on what selects here. A first call may take seconds, in which kernels are compiled."""
    if find_spec("torch") is None:
        yield "PyTorch is not installed here, so methods can be listed, but not built: pip install torch"
        return
    import torch

    from sparsify.kernels import native, trouble_with_gpu, trouble_with_native

    yield f"PyTorch {torch.__version__}"
    why = trouble_with_native()
    kernel = f"numpy, slower than C++: {why}" if why else f"C++ ({native.best_level()})"
    yield f"on the CPU selects {kernel}"
    for number in range(torch.cuda.device_count()):
        why = trouble_with_gpu(torch.device("cuda", number))
        kernel = f"torch.topk, slower than Triton: {why}" if why else "Triton"
        yield f"on {torch.cuda.get_device_name(number)} selects {kernel}"


def methods() -> Iterator[str]:
    """Each, with the first sentence about it, or why its file can't be read."""
    from sparsify.methods import REGISTRY

    for name in REGISTRY.names():
        about = REGISTRY.why_broken(name) or REGISTRY.summary(name).partition(". ")[0]
        yield f"{name:<13} {about}"


if __name__ == "__main__":
    sys.exit(main())
