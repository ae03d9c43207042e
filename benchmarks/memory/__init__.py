"""What the memory benchmarks are made of: the models, what is measured and predicted of them, and the picture."""
