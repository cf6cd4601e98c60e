"""The same prompts through Tandem and through its peers, interleaved in one run. `make bench-peers`; see README.md."""
