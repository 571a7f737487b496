"""Model families: `config.py` is what each is reduced to, `registry.py` finds a family by name.

Nothing is imported here: `mpk.graph` needs `mpk.models.config`, and the families need `mpk.graph`.
"""
