"""What the text of a compiled program tells: `collectives` and `matrix_flops`, read by `hlo`."""
