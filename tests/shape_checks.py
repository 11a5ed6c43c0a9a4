"""The checker of annotated array shapes and types in `make test-all`: an int serves where a float is annotated."""

import beartype


check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
