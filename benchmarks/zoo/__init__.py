"""The architectures of the pipeline benchmark, small."""
