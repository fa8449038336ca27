"""Model FLOPs utilization: the formula by hand, peaks by device names, kinds of kernels."""

import pytest

from benchmarks.gpu_train import SHAPES
from benchmarks.utilization import by_kind, flops_per_token, kind_of, kinds_table, peak_flops, utilization


def test_flops_follow_the_formula():
    shape = SHAPES["1B"]
    table = 32000 * 2048
    assert flops_per_token(shape, 1_000_000_000 + table) == 6e9 + 12 * 16 * 2048 * 2048


def test_mfu_is_over_the_devices_peak():
    shape = SHAPES["160M"]
    found = utilization(shape, 150_000_000, tokens=4096, ms=100.0, device="NVIDIA H100 80GB HBM3")
    assert found["tokens_per_s"] == pytest.approx(40960)
    assert found["mfu"] == pytest.approx(flops_per_token(shape, 150_000_000) * 40960 / 989.4e12)
    assert utilization(shape, 1, 4096, 100.0, "cpu") == {"tokens_per_s": pytest.approx(40960)}


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H200", 989.4),
    ],
)
def test_peaks_go_by_name(device, tflops):
    assert peak_flops(device) == tflops * 1e12
    assert peak_flops("cpu") is None


def test_kernels_have_kinds():
    names = {
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "communication",
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTT": "matrix products",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26": "attention",
        "dcompile_rows_cc0a878a": "fused kernels",
        "triton_poi_fused_add_0": "fused kernels",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdam": "optimizer",
        "at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel": "conversions and copies",
        "Memcpy PtoP (Device -> Device)": "copies between GPUs",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward": "ATen's others",
    }
    assert {name: kind_of(name) for name in names} == names


def test_time_is_summed_by_kinds_and_listed():
    events = [("nvjet_a", 0.0, 2.0), ("nvjet_b", 2.0, 3.0), ("triton_x", 3.0, 4.0), ("nvjet_a", 4.0, 7.0)]
    found = by_kind(events, 2)
    assert found == {"matrix products": (1.5, 3.0), "fused kernels": (0.5, 0.5)}
    rows = kinds_table({"a": found, "b": {"fused kernels": (1.0, 4.0)}})
    assert rows == [
        ["fused kernels", "0.50 (0)", "4.00 (1)"],
        ["matrix products", "3.00 (2)", ""],
        ["all", "3.50 (2)", "4.00 (1)"],
    ]
