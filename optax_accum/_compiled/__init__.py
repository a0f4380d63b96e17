"""What the text of a compiled program tells: `collectives`, read by `hlo`; and `scopes`."""
