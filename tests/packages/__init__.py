"""Other people's packages, small, under every plan against plain Lightning: `make packages` runs them and writes docs/packages.md,
`make packages-cuda` runs them on two stub GPUs.

``member`` is what a model here is. ``molecules``, ``forecasting``, ``cells``, ``vision``, ``segmentation``, ``graphs``, ``language``,
``denoising`` and ``tensordicts`` are the models, listed in ``zoo``. ``plans`` are the columns. ``cell`` is a run in a process of its own,
which ``judge`` holds against plain Lightning's. ``matrix`` runs them all, ``render`` writes the page."""
