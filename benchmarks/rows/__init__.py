"""Published training runs as modules, batches and plans of ours."""
