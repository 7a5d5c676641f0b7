"""The table of the ways to a Triton."""

from benchmarks.remote import Measured, as_table, ways


def test_ratios_are_medians_of_neighbours() -> None:
    direct, alone, batched = ways("m")
    results = {
        direct: [Measured(n, 1e-3, 2e-3, 0.0, 9.0, 1.0) for n in (100.0, 200.0, 400.0)],
        alone: [Measured(n, 1e-3, 2e-3, 5.0, 9.0, 1.0) for n in (90.0, 160.0, 100.0)],
        batched: [Measured(n, 1e-3, 2e-3, 5.0, 3.0, 4.0) for n in (150.0, 500.0, 800.0)],
    }
    rows = [line.split("|")[1:4] for line in as_table(results).splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["Triton directly", "200", "1.00"],
        ["through, batching off", "100", "0.80"],
        ["through, batched here", "500", "2.00"],
    ]
