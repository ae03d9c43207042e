"""Lightning's own tests, run with ``autopar`` as every Trainer's strategy; see README.md beside this."""
