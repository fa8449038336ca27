"""Convolutional models by kernels of ours: what tests/capture asks of the layout pass, of the whole compiler."""

from tests.capture.passes.joint.test_layouts import (  # noqa: F401
    test_inference_too,
    test_strides_are_eagers_and_errors_no_larger,
)
