"""What `tandem bench` measures and how: workloads, the paired plan, one timed request, statistics, report, chart."""
