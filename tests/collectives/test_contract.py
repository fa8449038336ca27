"""What compiling one graph came to, as a line of the log."""

from dcompile.collectives.contract import ProgramReport


def test_a_report_is_a_line_to_read():
    made = ProgramReport(kernels=2, kernel_calls=3, built=1, cache_hits=1, library_calls=4, fallbacks={"aten.sort": 2})
    calls = "3 kernel calls of 2 kernels (1 built, 1 in the cache); 4 library calls; fallbacks: aten.sort x2"
    assert str(made) == f"{calls}; 0.00 s"
    found = ProgramReport(collectives=1, graphs_cached=1, compile_seconds=1.25, notes=["the receipt's"])
    assert str(found) == "loaded from the cache; 0 kernel calls of 0 kernels; 0 library calls; 1 collectives; 1.25 s"
    assert str(ProgramReport(graphs_received=1)).startswith("received from another rank; ")
