"""Names of parts of a program, by which its compiled text is read."""

END_OF_CYCLE = "end_of_cycle"  # the conditional that ends a cycle
WHOLE_CYCLE = "whole_cycle"  # the optimizer's step of a call that takes one
