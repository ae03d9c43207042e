"""A generator of modules: parts that scripts are made of, combined at random and run under every plan against plain Lightning.

In reading order: `recipe` (which parts), `nets`, `losses`, `data`, `module` (what the parts are), `run` (`make fuzz`).
"""
