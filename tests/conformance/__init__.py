"""The conformance suite: small, ordinary LightningModules × what a Trainer can do × every engine, held against plain Lightning."""
