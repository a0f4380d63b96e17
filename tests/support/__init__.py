"""What the test files share, and the benchmarks with them."""
