"""Which plans there are, what each would need and take, and which is best: pure functions of values.

Knows neither torch.distributed nor Lightning; it starts nothing and touches no device.
"""
